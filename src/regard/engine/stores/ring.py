"""Rings: a layer whose tokens see only the last w before them, and perhaps the first few of a text, keeps only those.

    slot(t) = t                              for the first, which are seen from everywhere
              first + (t - first) mod r      for the others, r = w + slack

A token is written over the one that stood r before it, which nobody sees any more. Which tokens lie in the slots comes
out as data, so masks, biases and kernels know nothing of rings. Up to slack + 1 tokens are written, then read with the
rest; longer pieces read what lay there before and themselves, then their end is written. As many as `slack` tokens can
be taken back: what they were written over was out of sight there too. Memory is O(w) for a text of any length, as in
Jiang et al. 2023 (Mistral 7B); with first tokens, Xiao et al. 2023.
"""

import torch
from torch import Tensor

from regard.engine.stores.row_table import RowTable, rows_of
from regard.layout import TokenLayout
from regard.parts.state import PerToken

SLACK = 16  # tokens that every ring can take back: speculation drafts fewer
EMPTY = -1


class RingBuffer:
    """Which tokens lie in the slots, of all layers that see equally far; and what these layers keep there."""

    def __init__(self, window: int, first: int, slack: int, rows: RowTable):
        self.window, self.first, self.slack, self.rows = window, first, slack, rows
        self.size = first + window + slack
        # One slot more: invalid tokens are written there, and those that this very forward would write over.
        self.positions = torch.full((len(rows), self.size + 1), EMPTY, device=rows.device)
        self.arrays: list[Tensor] = []
        rows.carriers.append(self)

    def slots(self, positions: Tensor) -> Tensor:
        turned = self.first + (positions - self.first) % (self.window + self.slack)
        return positions.where(positions < self.first, turned)

    def place(self, layout: TokenLayout) -> tuple[Tensor, Tensor, TokenLayout]:
        """(B, 1) rows and (B, L) slots of the new tokens, and `layout` before all that they may see."""
        new, valid = (
            layout.positions,
            torch.ones_like(layout.positions, dtype=torch.bool) if layout.valid is None else layout.valid,
        )
        last = new.where(valid, EMPTY).amax(1, keepdim=True)  # (B, 1)
        stays = valid & ((new < self.first) | (new > last - self.window - self.slack))
        slots = self.slots(new).where(stays, self.size)
        rows = torch.arange(len(new), device=new.device) if layout.rows is None else layout.rows
        before = self.positions[rows, : self.size]  # (B, size), a copy
        self.positions[rows.unsqueeze(-1), slots] = new
        if self.joins(layout):
            start = new.where(valid, last).amin(1, keepdim=True)  # (B, 1)
            seen = (before != EMPTY) & (before < start)  # a row that begins again may still hold its old tokens
            keys = layout.with_keys(torch.cat([before, new], 1), torch.cat([seen, valid], 1))
        else:
            after = self.positions[rows, : self.size]
            keys = layout.with_keys(after, after != EMPTY)
        return rows.unsqueeze(-1), slots, keys

    def joins(self, layout: TokenLayout) -> bool:
        """Are there more new tokens than can be written before they are read?"""
        return layout.positions.shape[1] > self.slack + 1

    def held(self, row: int) -> list[Tensor]:
        return [self.positions[row], *(array[row] for array in self.arrays)]

    def lost(self, row: int, length: int) -> str | None:
        """Why a row cannot go back to this length; None: all that its next token sees is still there."""
        near = range(max(0, length - self.window + 1), length)
        needed = torch.tensor([*range(min(self.first, length)), *near], dtype=torch.int64, device=self.positions.device)
        if torch.equal(self.positions[row, self.slots(needed)], needed):
            return None
        return f"a window of {self.window} has written over tokens that it saw there"

    def clear(self, row: int, start: int) -> None:
        gone = self.positions[row] >= start  # (size + 1,)
        for array in self.arrays:
            array[row].masked_fill_(gone.unsqueeze(-1), 0)  # (heads, size + 1, dim)
        self.positions[row].masked_fill_(gone, EMPTY)


class RingState:
    def __init__(self, declared: PerToken, ring: RingBuffer, dtype: torch.dtype):
        self.ring = ring
        self.arrays = {
            name: torch.zeros(len(ring.rows), heads, ring.size + 1, dim, dtype=dtype, device=ring.rows.device)
            for name, (heads, dim) in declared.arrays.items()
        }
        ring.arrays += self.arrays.values()

    def extend(self, layout: TokenLayout, **arrays: Tensor) -> tuple:
        ring = self.ring
        ring.rows.note(layout)
        rows, slots, keys = layout.once(ring, lambda: ring.place(layout))
        kept = []
        for name, new in arrays.items():
            array = self.arrays[name]  # (rows, heads, size + 1, dim)
            if ring.joins(layout):
                kept.append(torch.cat([array[rows_of(layout), :, : ring.size], new], 2))  # (B, heads, size + L, dim)
                array[rows, :, slots] = new.transpose(1, 2)
            else:
                array[rows, :, slots] = new.transpose(1, 2)
                kept.append(array[rows_of(layout), :, : ring.size])  # (B, heads, size, dim)
        return (*kept, keys)
