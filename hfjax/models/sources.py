# SPDX-License-Identifier: Apache-2.0
"""Checkpoint files as named tensors that can be read in slices; checked before anything is read."""

import logging
import os
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from safetensors import SafetensorError, safe_open

from hfjax.files import read_json

log = logging.getLogger(__name__)

Slices = tuple[slice, ...]
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FLOATS = ("F64", "F32", "F16", "BF16")  # safetensors' names


class Source(Protocol):
    """Tensors under Hugging Face's names."""

    where: str  # for errors
    shapes: dict[str, tuple[int, ...]]

    def read(self, name: str, slices: Slices) -> np.ndarray:
        """The part of a tensor that `slices` (start and stop only, one a dimension) select."""
        ...


class SafetensorsFiles:
    """A directory's safetensors files, single or sharded under an index."""

    def __init__(self, directory: Path) -> None:
        self.where = str(directory)
        self._files: dict[str, Any] = {}  # tensor -> open file
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path, names in _files_of(directory).items():
            self._add(path, names)

    def read(self, name: str, slices: Slices) -> np.ndarray:
        tensor = self._files[name].get_slice(name)
        return tensor[slices] if slices else self._files[name].get_tensor(name)

    def _add(self, path: Path, names: list[str] | None) -> None:
        file = _open(path)
        held = set(file.keys())
        absent = sorted(set(names or []) - held)
        if absent:
            raise ValueError(f"{path} does not hold {absent[0]!r}, which {INDEX} places there")
        for name in held if names is None else names:
            tensor = file.get_slice(name)
            if tensor.get_dtype() not in FLOATS:
                raise ValueError(
                    f"{path}: {name!r} has dtype {tensor.get_dtype()}, which is not supported; "
                    f"use one of {', '.join(FLOATS)}"
                )
            self._files[name] = file
            self.shapes[name] = tuple(tensor.get_shape())


def tensor_names(directory: Path) -> set[str]:
    """Names of the tensors in a directory's safetensors files; empty where there are none."""
    if (directory / SINGLE).exists():
        return set(_open(directory / SINGLE).keys())
    if (directory / INDEX).exists():
        return set(_weight_map(directory / INDEX))
    return set()


def _files_of(directory: Path) -> dict[Path, list[str] | None]:
    """Files to open and which of their tensors to take (None: all)."""
    if (directory / SINGLE).exists():  # transformers too prefers it to an index
        files: dict[Path, list[str] | None] = {directory / SINGLE: None}
    elif (directory / INDEX).exists():
        files = {}
        for tensor, file in _weight_map(directory / INDEX).items():
            if Path(file).name != file:
                raise ValueError(f"{directory / INDEX} points outside its directory: {file!r}")
            taken = files.setdefault(directory / file, [])
            assert taken is not None
            taken.append(tensor)
    else:
        raise ValueError(_no_weights(directory))
    for path, names in files.items():
        if not os.path.isfile(path):  # also of a name that no file can have
            placed = f"{INDEX} places {len(names or ())} tensors"
            first = f", e.g. {names[0]!r:.100}" if names else ""
            raise ValueError(f"{directory}/{path.name:.100} is missing: {placed}{first}")
    stray = sorted(path.name for path in set(directory.glob("*.safetensors")) - set(files))
    if stray:
        log.warning("%s: %s not part of the model, ignored", directory, ", ".join(stray))
    return files


def _weight_map(index: Path) -> dict[str, str]:
    found = read_json(index).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise ValueError(
            f"{index} is not a safetensors index: weight_map must name a file for each tensor"
        )
    if not found:
        raise ValueError(f"{index} lists no tensors")
    return found


def _no_weights(directory: Path) -> str:
    pickles = sorted(path.name for path in directory.glob("*.bin"))
    pickles += sorted(path.name for path in directory.glob("*.pt*"))
    if pickles:
        return (
            f"{directory} holds weights only as pickles ({', '.join(pickles)}), which are never "
            "opened: they can run code; save the model with safe_serialization=True"
        )
    return f"{directory} holds neither {SINGLE} nor {INDEX}: nothing to load"


def _open(path: Path) -> Any:
    """An open file whose header covers it whole: a cut file fails here, before a tensor is read."""
    try:
        return safe_open(str(path), framework="numpy")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged or cut short: {error}") from error
