"""What a mixer remembers between forwards.

A mixer declares it (`memory`), a store decides how it is kept (engine/stores), and forward is handed a state:

    k, v, at = state.extend(at, k=k, v=v)     per token: put these behind what is remembered, get everything back
    h, c = state.read(at, h=…, c=…); state.write(at, h=h, c=c)     fixed size: what a recurrence carries along
    k, v, at = state.recall(at, read)     per token of a source: computed while it is there, remembered after

FRESH remembers nothing and hands its inputs back, so training and decoding are one forward.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from regard.layout import TokenLayout


@dataclass(frozen=True)
class PerToken:
    """Arrays with one entry a token: name -> (heads, dim), e.g. keys and values."""

    arrays: dict[str, tuple[int, int]]
    window: int | None = None  # tokens that are ever seen again: the last so many, the newest counted; None: all
    first: int = 0  # and so many at the beginning
    pages: bool = False  # may they be handed out where they lie, as Pages (kernels/attention/pages.py)?


@dataclass(frozen=True)
class FixedSize:
    """Arrays for a whole sequence, however long: name -> shape, kept in at least float32."""

    arrays: dict[str, tuple[int, ...]]

    def zeros(self, x: Tensor) -> dict[str, Tensor]:
        """The arrays of texts that begin with x (B, …), where they begin with nothing: name -> (B, *shape)."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return {name: x.new_zeros(len(x), *shape, dtype=wide) for name, shape in self.arrays.items()}


@dataclass(frozen=True)
class PerSource:
    """Arrays with one entry a token of the source that cross-attention reads, written with a row's first tokens."""

    arrays: dict[str, tuple[int, int]]


Declared = PerToken | FixedSize | PerSource | None
Memory = Declared | tuple[Declared, ...]  # a tuple: of several kinds, and its state has the methods of all


def each(memory: Memory) -> tuple[Declared, ...]:
    """What one body declares, kind by kind."""
    return memory if isinstance(memory, tuple) else (memory,)


class TokenState(Protocol):
    def extend(self, layout: TokenLayout, **arrays: Tensor) -> tuple:
        """Remember (B, heads, L, dim) arrays at `layout`; -> all of them (B, heads, S, dim), and `layout` with keys."""
        ...


class FixedState(Protocol):
    def read(self, layout: TokenLayout, **empty: Tensor) -> tuple[Tensor, ...]:
        """The fixed arrays of these rows, or what is given as `empty` where a row begins (position 0)."""
        ...

    def write(self, layout: TokenLayout, **arrays: Tensor) -> None:
        """Remember the fixed arrays of these rows."""
        ...


class SourceState(Protocol):
    def recall(self, layout: TokenLayout, read: Callable[[Tensor], dict[str, Tensor]]) -> tuple:
        """The arrays (B, heads, S, dim) of the source, read now if `layout` has it; and `layout` before its tokens."""
        ...


State = Any  # a TokenState, FixedState or SourceState, as the mixer declared


class Stateless:
    def extend(self, layout: TokenLayout, **arrays: Tensor) -> tuple:
        return (*arrays.values(), layout)

    def read(self, layout: TokenLayout, **empty: Tensor) -> tuple[Tensor, ...]:
        return tuple(empty.values())

    def write(self, layout: TokenLayout, **arrays: Tensor) -> None:
        pass

    def recall(self, layout: TokenLayout, read: Callable[[Tensor], dict[str, Tensor]]) -> tuple:
        if (source := layout.inputs.source) is None:
            raise ValueError("cross-attention has no source to read and remembers none; give at.source, or a state")
        return (*read(source.x).values(), layout.cross(source.layout))


STATELESS = Stateless()


class FinalState(Stateless):
    """Fresh too, but it keeps the fixed arrays that are written last: how a recurrence ended."""

    def __init__(self) -> None:
        self.arrays: dict[str, Tensor] = {}

    def write(self, layout: TokenLayout, **arrays: Tensor) -> None:
        self.arrays = arrays
