"""What a mixer remembers between forwards.

A mixer declares it (`memory`), a store decides how it is kept (engine/stores), and forward is handed a state:

    k, v, at = state.extend(at, k=k, v=v)     per token: put these behind what is remembered, get everything back
    past = state.read(at, …); state.write(at, past)     fixed size: the sums of a recurrence
    k, v, at = state.recall(at, read)     per token of a source: computed while it is there, remembered after

FRESH remembers nothing and hands its inputs back, so training and decoding are one forward.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from regard.at import At


@dataclass(frozen=True)
class PerToken:
    """Arrays with one entry a token: name -> (heads, dim), e.g. keys and values."""

    arrays: dict[str, tuple[int, int]]


@dataclass(frozen=True)
class Fixed:
    """One array of this shape for a whole sequence, kept in at least float32; it cannot be rewound."""

    shape: tuple[int, ...]


@dataclass(frozen=True)
class PerSource:
    """Arrays with one entry a token of the source that cross-attention reads, written with a row's first tokens."""

    arrays: dict[str, tuple[int, int]]


Memory = PerToken | Fixed | PerSource | None


class TokenState(Protocol):
    def extend(self, at: At, **arrays: Tensor) -> tuple:
        """Remember (B, heads, L, dim) arrays at `at`; -> all of them (B, heads, S, dim), and `at` with keys."""
        ...


class FixedState(Protocol):
    def read(self, at: At, empty: Tensor) -> Tensor:
        """The fixed array of these rows, or `empty` where a row begins (position 0)."""
        ...

    def write(self, at: At, array: Tensor) -> None:
        """Remember the fixed array of these rows."""
        ...


class SourceState(Protocol):
    def recall(self, at: At, read: Callable[[Tensor], dict[str, Tensor]]) -> tuple:
        """The arrays (B, heads, S, dim) of the source, read now if `at` has it; and `at` before its tokens."""
        ...


State = Any  # a TokenState, FixedState or SourceState, as the mixer declared


class Fresh:
    def extend(self, at: At, **arrays: Tensor) -> tuple:
        return (*arrays.values(), at)

    def read(self, at: At, empty: Tensor) -> Tensor:
        return empty

    def write(self, at: At, array: Tensor) -> None:
        pass

    def recall(self, at: At, read: Callable[[Tensor], dict[str, Tensor]]) -> tuple:
        if at.source is None:
            raise ValueError("cross-attention has no source to read and remembers none; give at.source, or a state")
        return (*read(at.source.x).values(), at.before_source(at.source.at))


FRESH = Fresh()
