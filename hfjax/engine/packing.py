# SPDX-License-Identifier: Apache-2.0
"""Packed rows, as forward passes read them: a prefix once, behind it all responses that follow it.

What n rows share is computed once, and the head reads only what is scored. A packed row has P slots
of the prefix and n times R slots: W = P + n R. A token sees the tokens it would see in a row of its
own, at the same positions: no number depends on the packing, to rounding.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

Columns = Mapping[str, np.ndarray]

IDS, MASK, PREFIX_LENGTH = "input_ids", "response_mask", "prefix_length"


@dataclass(frozen=True)
class Packing:
    """How groups of n rows are cut, each at its first trained token."""

    slots: int  # P; 0: the rows stay whole
    n: int
    starts_G: np.ndarray  # tokens of each group's prefix
    lengths_G: np.ndarray  # of its longest response, to the last trained token

    @property
    def longest(self) -> int:
        """Tokens of the longest response: the least R."""
        return int(self.lengths_G.max(initial=1))

    def width(self, R: int) -> int:
        """Slots of a packed row, W."""
        return self.slots + self.n * R

    def packed(self, rows: Columns, R: int) -> dict[str, np.ndarray]:
        """input_ids (G, W), prefix_length (G,), and per-token columns from there on: (B, R).

        A column is per-token when it is as wide as input_ids. Whole rows have no prefix_length.
        """
        ids_BT = rows[IDS]
        found = {
            name: self._responses(x, R) if x.shape[1:2] == ids_BT.shape[1:2] else x
            for name, x in rows.items()
        }
        if not self.slots:
            return found
        in_prefix_GP = np.arange(self.slots) < self.starts_G[:, None]
        prefix_GP = np.where(in_prefix_GP, ids_BT[:: self.n, : self.slots], 0)
        responses_GR = found[IDS].reshape(len(prefix_GP), self.n * R)
        found[IDS] = np.concatenate([prefix_GP, responses_GR], axis=1, dtype=ids_BT.dtype)
        return found | {PREFIX_LENGTH: self.starts_G.astype(np.int32)}

    def unpacked(self, x_BR: np.ndarray, T: int) -> np.ndarray:
        """Columns of responses at their places in rows of T tokens, 0 elsewhere."""
        slot_BT = np.arange(T) - np.repeat(self.starts_G, self.n)[:, None]
        here_BT = (slot_BT >= 0) & (slot_BT < x_BR.shape[1])
        at_BT = np.clip(slot_BT, 0, x_BR.shape[1] - 1)
        return np.where(here_BT, np.take_along_axis(x_BR, at_BT, axis=1), x_BR.dtype.type(0))

    def _responses(self, x_BT: np.ndarray, R: int) -> np.ndarray:
        if not self.slots:
            return x_BT[:, :R]
        at_BR = np.repeat(self.starts_G, self.n)[:, None] + np.arange(R)
        found_BR = x_BT[np.arange(len(x_BT))[:, None], np.minimum(at_BR, x_BT.shape[1] - 1)]
        found_BR[at_BR >= x_BT.shape[1]] = 0
        return found_BR


def prefix_slots(tokens: int, bucket: int, most: int) -> int:
    """P for prefixes of so many tokens: bucket times a power of two, at most `most`."""
    return min(bucket << (-(-tokens // bucket) - 1).bit_length(), most)


def response_slots(tokens: int, bucket: int, most: int) -> int:
    """R: bucket times 1 to 8, 10, 12, 14, 16, 20 and so on, four to each doubling.

    P and R are compiled together, so there must be few of each.
    """
    units = -(-tokens // bucket)
    step = 1 << max((units - 1).bit_length() - 3, 0)
    return min(-(-units // step) * step * bucket, most)


def packing_of(rows: Columns, n: int) -> Packing | None:
    """Groups of n neighbouring rows, in as few slots as hold them; None where they share no prefix.

    Rows that train their first token, which nothing predicts, are not packed either.
    """
    ids_BT, mask_BT = rows[IDS], rows[MASK].astype(bool)
    B, T = ids_BT.shape
    if B % n or mask_BT[:, :1].any():
        return None
    some_B = mask_BT.any(axis=1)
    first_B = np.where(some_B, mask_BT.argmax(axis=1), T)
    end_B = np.where(some_B, T - mask_BT[:, ::-1].argmax(axis=1), 0)
    starts_G = first_B.reshape(-1, n).min(axis=1)
    starts_G = np.where(starts_G < T, starts_G, 1)
    lengths_G = np.maximum(end_B.reshape(-1, n).max(axis=1) - starts_G, 1)
    if n > 1:
        ids_GnT = ids_BT.reshape(-1, n, T)
        own_GT = np.arange(T) >= starts_G[:, None]
        if not ((ids_GnT == ids_GnT[:, :1]) | own_GT[:, None]).all():
            return None
    return Packing(int(starts_G.max(initial=1)), n, starts_G, lengths_G)
