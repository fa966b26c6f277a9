"""What a recurrence carries along: arrays of a fixed size for each row, the same in every store."""

import torch
from torch import Tensor

from regard.engine.stores.row_table import RowTable, rows_of
from regard.layout import TokenLayout
from regard.parts.state import FixedSize


class RowState:
    def __init__(self, declared: FixedSize, rows: RowTable, dtype: torch.dtype):
        self.rows = rows
        wide = torch.promote_types(dtype, torch.float32)
        self.arrays = {
            name: torch.zeros(len(rows), *shape, dtype=wide, device=rows.device)
            for name, shape in declared.arrays.items()
        }
        rows.carriers.append(self)

    def read(self, layout: TokenLayout, **empty: Tensor) -> tuple[Tensor, ...]:
        layout.refuse_packed()
        rows = rows_of(layout)
        begins = layout.once("begins", lambda: begin(layout))  # (B,)
        return tuple(
            new.where(begins.view(-1, *[1] * (new.dim() - 1)), self.arrays[name][rows]) for name, new in empty.items()
        )

    def write(self, layout: TokenLayout, **arrays: Tensor) -> None:
        self.rows.note(layout)
        rows = rows_of(layout)
        for name, array in arrays.items():
            self.arrays[name][rows] = array.to(self.arrays[name].dtype)

    def held(self, row: int) -> list[Tensor]:
        return [array[row] for array in self.arrays.values()]

    def lost(self, row: int, length: int) -> str:
        return "a recurrence carries only a sum of its past, which cannot be undone"

    def clear(self, row: int, start: int) -> None:
        pass  # who begins at position 0 does not read it


def begin(layout: TokenLayout) -> Tensor:
    """(B,) does a row begin here?"""
    first = layout.positions == 0 if layout.valid is None else (layout.positions == 0) & layout.valid  # (B, L)
    return first.any(-1)
