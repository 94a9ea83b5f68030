# SPDX-License-Identifier: Apache-2.0
"""hfjax: HybridFlow for JAX. Public names load on first use, so that importing it is light."""

import importlib
from typing import Any

PUBLIC = {
    "Actor": "hfjax.roles",
    "Batch": "hfjax.batch",
    "Critic": "hfjax.roles",
    "FunctionReward": "hfjax.rewards",
    "Reference": "hfjax.roles",
    "Reward": "hfjax.roles",
    "export_run": "hfjax.rundir",
    "load_algorithm": "hfjax.algorithm",
    "load_placement": "meshes.placement",
    "meter": "hfjax.engine.meter",
    "method": "hfjax.controller.protocol",
    "train": "hfjax.run",
}
__all__ = list(PUBLIC)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(f"hfjax has no {name!r}; its public names are {', '.join(PUBLIC)}")
    return getattr(importlib.import_module(PUBLIC[name]), name)
