"""Ring buffers: a layer with an attention window, and perhaps some first tokens, keeps only those tokens.

    slot(t) = t                              for the first tokens, which all queries attend to
              first + (t - first) mod r      for the others, r = window + slack

A token overwrites the one r positions earlier, which is outside the window of every later query. The positions in the
slots are returned as data, so masks, biases and kernels need no code for rings. Up to slack + 1 new tokens are written
before the slots are read. A longer chunk attends to the old slots and to itself; then its last tokens are written. Up
to `slack` tokens can be rewound: the tokens that they overwrote are outside the earlier window too. Memory is O(window)
for a sequence of any length, as in Jiang et al. 2023 (Mistral 7B); with first tokens, Xiao et al. 2023.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.engine.stores.arrays import encoding_of, zeros
from regard.engine.stores.rows import KeyLayout, RowTable, copy, row_indices, rows_of
from regard.kernels.attention.arguments import Pages
from regard.layout import TokenLayout
from regard.parts.state import PerToken

EMPTY = -1


class RingPlacement(NamedTuple):
    rows: Tensor  # (B,)
    slots: Tensor  # (B, L) of the new tokens, among those of all rows
    keys: KeyLayout  # that the new tokens may attend to
    appends: bool  # keys are the old slots followed by the new tokens, not the slots after writing


class RingBuffer:
    """The positions in the slots, shared by all layers with the same window, and the arrays of these layers."""

    def __init__(self, window: int, first: int, slack: int, rows: RowTable):
        self.window, self.first, self.slack, self.rows = window, first, slack, rows
        self.size = first + window + slack
        # One slot more, for invalid tokens and for those that later tokens of the same forward would overwrite.
        self.positions = torch.full((len(rows) * self.size + 1,), EMPTY, device=rows.device)
        self.arrays: list[Tensor] = []
        rows.overwriting.append(self)

    def slots(self, positions: Tensor) -> Tensor:
        wrapped = self.first + (positions - self.first) % (self.window + self.slack)
        return positions.where(positions < self.first, wrapped)

    def place(self, layout: TokenLayout, span: int) -> RingPlacement:
        """Assign slots to the new tokens and record their positions; the keys are those of all slots."""
        new = layout.positions
        valid = torch.ones_like(new, dtype=torch.bool) if layout.valid is None else layout.valid
        last = new.where(valid, EMPTY).amax(1, keepdim=True)  # (B, 1)
        stored = valid & ((new < self.first) | (new > last - self.window - self.slack))
        rows = row_indices(layout)
        slots = (rows.unsqueeze(-1) * self.size + self.slots(new)).where(stored, len(self.positions) - 1)
        old = self.per_row(self.positions)[rows]  # (B, size), a copy
        self.positions[slots] = new
        appends = new.shape[1] > self.slack + 1
        if appends:
            start = new.where(valid, last).amin(1, keepdim=True)  # (B, 1)
            earlier = (old != EMPTY) & (old < start)  # a reused row may still hold tokens of another sequence
            keys = KeyLayout(torch.cat([old, new], 1), torch.cat([earlier, valid], 1))
        else:
            positions = self.per_row(self.positions)[rows]
            keys = KeyLayout(positions, positions != EMPTY)
        return RingPlacement(rows, slots, keys, appends)

    def per_row(self, array: Tensor) -> Tensor:
        """(slots of all rows, …) -> (rows, size, …), a view"""
        return array[:-1].unflatten(0, (-1, self.size))

    def row_arrays(self, row: int) -> list[Tensor]:
        return [self.per_row(array)[row] for array in (self.positions, *self.arrays)]

    def restore(self, row: int, copies: list[Tensor]) -> None:
        copy(copies, self.row_arrays(row))

    def why_not_rewind(self, row: int, length: int) -> str | None:
        recent = range(max(0, length - self.window + 1), length)
        needed = torch.tensor(
            [*range(min(self.first, length)), *recent], dtype=torch.int64, device=self.positions.device
        )
        if torch.equal(self.per_row(self.positions)[row, self.slots(needed)], needed):
            return None
        return f"a window of {self.window} has overwritten tokens that the next token would attend to"

    def clear(self, row: int, start: int) -> None:
        positions, *arrays = self.row_arrays(row)
        dropped = positions >= start  # (size,)
        for array in arrays:
            array.masked_fill_(dropped[:, None, None], 0)  # (size, heads, dim)
        positions.masked_fill_(dropped, EMPTY)


class RingStorage:
    def __init__(self, declared: PerToken, ring: RingBuffer, dtype: torch.dtype):
        self.ring = self.placer = ring
        self.encoding = encoding_of(declared, dtype)
        self.arrays = {
            name: zeros((len(ring.positions), heads, dim), part_dtype, ring.rows.device)
            for name, heads, dim, part_dtype in self.encoding.parts(declared)
        }
        ring.arrays += self.arrays.values()

    def bind(self, layout: TokenLayout, placements: Mapping[Any, Any]) -> "RingState":
        return RingState(self, placements[self.placer])


class RingState(NamedTuple):
    storage: RingStorage
    placement: RingPlacement

    def pages(self, layout: TokenLayout, *names: str) -> list[Pages] | None:
        """The ring as one page per row, in which positions wrap around, for a kernel that appends the new token."""
        ring = self.storage.ring
        if layout.positions.shape[1] > 1 or ring.first or self.storage.encoding.quantizes:
            return None
        return [Pages(self.storage.arrays[name], self.placement.rows.unsqueeze(-1), ring.size) for name in names]

    def extend(self, layout: TokenLayout, **arrays: Tensor) -> tuple:
        _, slots, keys, appends = self.placement
        cached, encoding = [], self.storage.encoding
        for name, whole in arrays.items():
            parts = encoding.encode(name, whole)
            for part, new in parts.items():
                array, new = self.storage.arrays[part], new.transpose(1, 2)  # (slots, heads, dim), (B, L, heads, dim)
                per_row = self.storage.ring.per_row(array)
                if appends:
                    kept = torch.cat([per_row[rows_of(layout)], new], 1)  # (B, size + L, heads, dim)
                    array[slots] = new
                else:
                    array[slots] = new
                    kept = per_row[rows_of(layout)]  # (B, size, heads, dim)
                parts[part] = kept.transpose(1, 2)
            cached.append(encoding.decode(name, parts))
        return (*cached, keys.attach(layout))
