"""States whose size is known from the start, the same in every store: a recurrence's sums, a source's keys."""

from collections.abc import Callable, Iterator
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.at import At, Source
from regard.parts.state import FRESH, Declared, Fixed, PerSource, PerToken, State, each


class RowState:
    def __init__(self, declared: Fixed, rows: int, dtype: torch.dtype, device: torch.device | str):
        wide = torch.promote_types(dtype, torch.float32)
        self.arrays = {
            name: torch.zeros(rows, *shape, dtype=wide, device=device) for name, shape in declared.arrays.items()
        }

    def read(self, at: At, **empty: Tensor) -> tuple[Tensor, ...]:
        at.refuse_packed()
        rows = rows_of(at)
        begins = at.once("begins", lambda: begin(at))  # (B,)
        return tuple(
            new.where(begins.view(-1, *[1] * (new.dim() - 1)), self.arrays[name][rows]) for name, new in empty.items()
        )

    def write(self, at: At, **arrays: Tensor) -> None:
        rows = rows_of(at)
        for name, array in arrays.items():
            self.arrays[name][rows] = array.to(self.arrays[name].dtype)


def begin(at: At) -> Tensor:
    """(B,) does a row begin here?"""
    first = at.positions == 0 if at.valid is None else (at.positions == 0) & at.valid  # (B, L)
    return first.any(-1)


def rows_of(at: At) -> slice | Tensor:
    """The rows of the store that this forward is about."""
    return slice(len(at.positions)) if at.rows is None else at.rows


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
        rows = rows_of(at)
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


class Together:
    """The state of a body that declares several kinds: it has the methods of all."""

    def __init__(self, *parts: State):
        self.parts = parts
        for part in parts:
            for method in ("extend", "read", "write", "recall"):
                if hasattr(part, method):
                    setattr(self, method, getattr(part, method))


def build_states(
    memory,
    per_token: Callable[[PerToken], State],
    rows: int,
    source: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> tuple[tuple[State, ...], ...]:
    """A state for each declaration, in the same nesting; what remembers nothing gets FRESH."""

    def make(declared: Declared) -> State:
        match declared:
            case PerToken():
                return per_token(declared)
            case Fixed():
                return RowState(declared, rows, dtype, device)
            case PerSource():
                return SourceRows(declared, rows, source, dtype, device)
        return FRESH

    def together(made: list[State]) -> State:
        return made[0] if len(made) == 1 else Together(*made)

    return tuple(tuple(together([make(d) for d in each(one)]) for one in block) for block in memory)


def parts(block: tuple[State, ...]) -> Iterator[State]:
    """The states of a block, kind by kind."""
    for state in block:
        yield from state.parts if isinstance(state, Together) else (state,)


def forget_source(states: tuple[tuple[State, ...], ...], row: int) -> None:
    for state in chain(*map(parts, states)):
        if isinstance(state, SourceRows):
            state.clear(row)


class CannotRewind(ValueError):
    """A state that keeps only a sum of its past was asked to go back."""


def refuse_rewind(states: tuple[tuple[State, ...], ...]) -> None:
    for layer, block in enumerate(states):
        if any(isinstance(state, RowState) for state in parts(block)):
            raise CannotRewind(
                f"layer {layer} remembers only a sum of its past, which cannot be undone; read the text again"
            )
