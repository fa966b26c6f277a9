"""The keys and values of each row's source, read once and kept alike in every store; slots past its end are invalid."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.at import At, Source
from regard.engine.stores.rows import Rows, rows_of
from regard.parts.state import PerSource


class SourceRows:
    def __init__(self, declared: PerSource, rows: Rows, length: int, dtype: torch.dtype):
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

    def recall(self, at: At, read: Callable[[Tensor], dict[str, Tensor]]) -> tuple:
        at.refuse_packed()
        self.rows.note(at)
        rows = rows_of(at)
        if at.source is not None:
            self.keep(rows, at.source, read(at.source.x))
        valid = self.valid[rows]
        return (
            *(a[rows] for a in self.arrays.values()),
            at.before_source(At(self.slots.expand_as(valid), valid=valid)),
        )

    def held(self, row: int) -> list[Tensor]:
        return [self.valid[row], *(array[row] for array in self.arrays.values())]

    def keep(self, rows: slice | Tensor, source: Source, arrays: dict[str, Tensor]) -> None:
        length, room = source.x.shape[1], len(self.slots)
        if length > room:
            raise ValueError(f"a source of {length} tokens is longer than the {room} that the store keeps")
        spare = room - length
        valid = torch.ones_like(source.at.positions, dtype=torch.bool) if source.at.valid is None else source.at.valid
        self.valid[rows] = F.pad(valid, (0, spare))
        for name, new in arrays.items():
            new = new.masked_fill(~valid[:, None, :, None], 0)  # attention multiplies even what is masked
            self.arrays[name][rows] = F.pad(new, (0, 0, 0, spare))
