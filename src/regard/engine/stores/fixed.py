"""What a recurrence carries along: arrays of a fixed size for each row, the same in every store."""

import torch
from torch import Tensor

from regard.at import At
from regard.engine.stores.rows import Rows, rows_of
from regard.parts.state import Fixed


class RowState:
    def __init__(self, declared: Fixed, rows: Rows, dtype: torch.dtype):
        self.rows = rows
        wide = torch.promote_types(dtype, torch.float32)
        self.arrays = {
            name: torch.zeros(len(rows), *shape, dtype=wide, device=rows.device)
            for name, shape in declared.arrays.items()
        }
        rows.carriers.append(self)

    def read(self, at: At, **empty: Tensor) -> tuple[Tensor, ...]:
        at.refuse_packed()
        rows = rows_of(at)
        begins = at.once("begins", lambda: begin(at))  # (B,)
        return tuple(
            new.where(begins.view(-1, *[1] * (new.dim() - 1)), self.arrays[name][rows]) for name, new in empty.items()
        )

    def write(self, at: At, **arrays: Tensor) -> None:
        self.rows.note(at)
        rows = rows_of(at)
        for name, array in arrays.items():
            self.arrays[name][rows] = array.to(self.arrays[name].dtype)

    def held(self, row: int) -> list[Tensor]:
        return [array[row] for array in self.arrays.values()]

    def lost(self, row: int, length: int) -> str:
        return "a recurrence carries only a sum of its past, which cannot be undone"

    def clear(self, row: int, start: int) -> None:
        pass  # who begins at position 0 does not read it


def begin(at: At) -> Tensor:
    """(B,) does a row begin here?"""
    first = at.positions == 0 if at.valid is None else (at.positions == 0) & at.valid  # (B, L)
    return first.any(-1)
