"""Recurrent states: arrays of a fixed size per row, the same in every store."""

from typing import Any

import torch
from torch import Tensor

from regard.engine.stores.rows import RowTable, rows_of
from regard.layout import TokenLayout
from regard.parts.state import FixedSize


class FixedStorage:
    def __init__(self, declared: FixedSize, rows: RowTable, dtype: torch.dtype):
        wide = torch.promote_types(dtype, torch.float32)
        self.arrays = {
            name: torch.zeros(len(rows), *shape, dtype=wide, device=rows.device)
            for name, shape in declared.arrays.items()
        }
        rows.overwriting.append(self)

    def bind(self, layout: TokenLayout, placement: Any) -> "FixedStorage":
        return self  # rows come with the layout of every call

    def read(self, layout: TokenLayout, **initial: Tensor) -> tuple[Tensor, ...]:
        rows, starts = rows_of(layout), layout.derived(starting_rows)
        return tuple(
            new.where(starts.view(-1, *[1] * (new.dim() - 1)), self.arrays[name][rows]) for name, new in initial.items()
        )

    def write(self, layout: TokenLayout, **arrays: Tensor) -> None:
        rows = rows_of(layout)
        for name, array in arrays.items():
            self.arrays[name][rows] = array.to(self.arrays[name].dtype)

    def row_arrays(self, row: int) -> list[Tensor]:
        return [array[row] for array in self.arrays.values()]

    def why_not_rewind(self, row: int, length: int) -> str:
        return "a recurrent state is a sum over its tokens, which cannot be undone"

    def clear(self, row: int, start: int) -> None:
        pass  # a sequence that starts at position 0 does not read it


def starting_rows(layout: TokenLayout) -> Tensor:
    """(B,) True where a row's sequence starts in this forward"""
    first = layout.positions == 0 if layout.valid is None else (layout.positions == 0) & layout.valid  # (B, L)
    return first.any(-1)
