"""The keys and values of each row's source, read once and kept alike in every store; slots past its end are invalid."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.engine.stores.row_table import RowTable, rows_of
from regard.layout import Source, TokenLayout
from regard.parts.state import PerSource


class SourceRows:
    def __init__(self, declared: PerSource, rows: RowTable, length: int, dtype: torch.dtype):
        if length < 1:
            raise ValueError("this model reads a source; say how long one may be, for example source=512")
        self.rows = rows
        self.arrays = {
            name: torch.zeros(len(rows), heads, length, dim, dtype=dtype, device=rows.device)
            for name, (heads, dim) in declared.arrays.items()
        }
        self.valid = torch.zeros(len(rows), length, dtype=torch.bool, device=rows.device)
        self.slots = torch.arange(length, device=rows.device)
        rows.sources.append(self)

    def recall(self, layout: TokenLayout, read: Callable[[Tensor], dict[str, Tensor]]) -> tuple:
        layout.refuse_packed()
        self.rows.note(layout)
        rows = rows_of(layout)
        if layout.source is not None:
            self.keep(rows, layout.source, read(layout.source.x))
        valid = self.valid[rows]
        return (
            *(a[rows] for a in self.arrays.values()),
            layout.before_source(TokenLayout(self.slots.expand_as(valid), valid=valid)),
        )

    def held(self, row: int) -> list[Tensor]:
        return [self.valid[row], *(array[row] for array in self.arrays.values())]

    def keep(self, rows: slice | Tensor, source: Source, arrays: dict[str, Tensor]) -> None:
        length, room = source.x.shape[1], len(self.slots)
        if length > room:
            raise ValueError(f"a source of {length} tokens is longer than the {room} that the store keeps")
        spare = room - length
        valid = (
            torch.ones_like(source.layout.positions, dtype=torch.bool)
            if source.layout.valid is None
            else source.layout.valid
        )
        self.valid[rows] = F.pad(valid, (0, spare))
        for name, new in arrays.items():
            new = new.masked_fill(~valid[:, None, :, None], 0)  # attention multiplies even what is masked
            self.arrays[name][rows] = F.pad(new, (0, 0, 0, spare))
