"""Keys and values of each row's source for cross-attention: computed once, then kept, the same in every store."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.engine.stores.rows import RowTable, rows_of
from regard.layout import Source, TokenLayout
from regard.parts.state import PerSource

SPAN = 64


class SourceStorage:
    def __init__(self, declared: PerSource, rows: RowTable, length: int, dtype: torch.dtype):
        if length < 1:
            raise ValueError("this model has cross-attention; give the longest source's length, for example source=512")
        self.arrays = {
            name: torch.zeros(len(rows), heads, length, dim, dtype=dtype, device=rows.device)
            for name, (heads, dim) in declared.arrays.items()
        }
        self.valid = torch.zeros(len(rows), length, dtype=torch.bool, device=rows.device)  # False past a source's end
        self.positions = torch.arange(length, device=rows.device)
        self.span = min(SPAN, length)  # slots that are read: at least the longest source so far
        rows.sources.append(self)

    def bind(self, layout: TokenLayout, placement: Any) -> "SourceStorage":
        return self  # rows come with the layout of every call

    def recall(self, layout: TokenLayout, read: Callable[[Tensor], dict[str, Tensor]]) -> tuple:
        rows, source = rows_of(layout), layout.inputs.source
        if source is not None:
            self.keep(rows, source, read(source.x))
        valid = self.valid[rows, : self.span]
        keys = TokenLayout(self.positions[: self.span].expand_as(valid), valid=valid)
        return (*(a[rows, :, : self.span] for a in self.arrays.values()), layout.cross(keys))

    def row_arrays(self, row: int) -> list[Tensor]:
        return [self.valid[row], *(array[row] for array in self.arrays.values())]

    def keep(self, rows: slice | Tensor, source: Source, arrays: dict[str, Tensor]) -> None:
        length, capacity = source.x.shape[1], len(self.positions)
        if length > capacity:
            raise ValueError(
                f"the source has {length} tokens, but the store keeps {capacity}; open it with a larger source"
            )
        if length > self.span:
            self.span = min(1 << (length - 1).bit_length(), capacity)  # powers of two: shapes rarely change
        valid, spare = source.layout.valid, capacity - length
        valid = torch.ones_like(source.layout.positions, dtype=torch.bool) if valid is None else valid
        self.valid[rows] = F.pad(valid, (0, spare))
        for name, new in arrays.items():
            new = new.masked_fill(~valid[:, None, :, None], 0)  # attention multiplies masked values too
            self.arrays[name][rows] = F.pad(new, (0, 0, 0, spare))
