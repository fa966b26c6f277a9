"""States whose size is known from the start, the same in every store: a recurrence's sums, a source's keys."""

from collections.abc import Callable
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.at import At, Source
from regard.parts.state import FRESH, Fixed, PerSource, PerToken, State


class RowState:
    def __init__(self, declared: Fixed, rows: int, dtype: torch.dtype, device: torch.device | str):
        wide = torch.promote_types(dtype, torch.float32)
        self.array = torch.zeros(rows, *declared.shape, dtype=wide, device=device)

    def read(self, at: At, empty: Tensor) -> Tensor:
        at.refuse_packed()
        first = at.positions == 0 if at.valid is None else (at.positions == 0) & at.valid  # (B, L)
        begins = first.any(-1).view(-1, *[1] * (self.array.dim() - 1))
        return empty.where(begins, self.array[: len(empty)] if at.rows is None else self.array[at.rows])

    def write(self, at: At, array: Tensor) -> None:
        if at.rows is None:
            self.array[: len(array)] = array
        else:
            self.array[at.rows] = array


class SourceRows:
    """The keys and values of each row's source; slots past its end are invalid."""

    def __init__(self, declared: PerSource, rows: int, length: int, dtype: torch.dtype, device: torch.device | str):
        if length < 1:
            raise ValueError("this model reads a source; say how long one may be, for example source=512")
        self.arrays = {
            name: torch.zeros(rows, heads, length, dim, dtype=dtype, device=device)
            for name, (heads, dim) in declared.arrays.items()
        }
        self.valid = torch.zeros(rows, length, dtype=torch.bool, device=device)
        self.slots = torch.arange(length, device=device)

    def recall(self, at: At, read: Callable[[Tensor], dict[str, Tensor]]) -> tuple:
        at.refuse_packed()
        rows = slice(len(at.positions)) if at.rows is None else at.rows
        if at.source is not None:
            self.write(rows, at.source, read(at.source.x))
        valid = self.valid[rows]
        return (
            *(a[rows] for a in self.arrays.values()),
            at.before_source(At(self.slots.expand_as(valid), valid=valid)),
        )

    def clear(self, row: int) -> None:
        self.valid[row] = False
        for array in self.arrays.values():
            array[row] = 0

    def write(self, rows: slice | Tensor, source: Source, arrays: dict[str, Tensor]) -> None:
        length, room = source.x.shape[1], len(self.slots)
        if length > room:
            raise ValueError(f"a source of {length} tokens is longer than the {room} that the store keeps")
        spare = room - length
        valid = torch.ones_like(source.at.positions, dtype=torch.bool) if source.at.valid is None else source.at.valid
        self.valid[rows] = F.pad(valid, (0, spare))
        for name, new in arrays.items():
            new = new.masked_fill(~valid[:, None, :, None], 0)  # attention multiplies even what is masked
            self.arrays[name][rows] = F.pad(new, (0, 0, 0, spare))


def build_states(
    memory,
    per_token: Callable[[PerToken], State],
    rows: int,
    source: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> tuple[tuple[State, ...], ...]:
    """A state for each declaration, in the same nesting; what remembers nothing gets FRESH."""
    make = {
        PerToken: per_token,
        Fixed: lambda declared: RowState(declared, rows, dtype, device),
        PerSource: lambda declared: SourceRows(declared, rows, source, dtype, device),
        type(None): lambda _: FRESH,
    }
    return tuple(tuple(make[type(declared)](declared) for declared in block) for block in memory)


def forget_source(states: tuple[tuple[State, ...], ...], row: int) -> None:
    for state in chain(*states):
        if isinstance(state, SourceRows):
            state.clear(row)


class CannotRewind(ValueError):
    """A state that keeps only a sum of its past was asked to go back."""


def refuse_rewind(states: tuple[tuple[State, ...], ...]) -> None:
    for layer, block in enumerate(states):
        if any(isinstance(state, RowState) for state in block):
            raise CannotRewind(
                f"layer {layer} remembers only a sum of its past, which cannot be undone; read the text again"
            )
