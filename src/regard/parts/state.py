"""The state that a body keeps between forwards.

A body declares its arrays (`memory`), a store keeps them (engine/stores), and forward receives a state:

    k, v, layout = state.extend(layout, k=k, v=v)          per token: append to the cache, return all cached tokens
    h, c = state.read(layout, h=zeros, c=zeros); state.write(layout, h=h, c=c)          fixed size: a recurrence
    k, v, layout = state.read_source(layout, compute)  per source token: computed with the source, then cached

STATELESS keeps nothing and returns its inputs, so training and decoding share one forward.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from regard.kernels.attention.arguments import Pages
from regard.layout import TokenLayout
from regard.parts.position.base import Position


@dataclass(frozen=True)
class PerToken:
    """Arrays with one entry per token: name -> (heads, dim), e.g. keys and values."""

    rewinds: ClassVar[bool] = True  # whether the last tokens can be dropped without a copy of the state

    arrays: dict[str, tuple[int, int]]
    window: int | None = None  # number of last tokens that a query attends to, itself included; None: all
    first: int = 0  # number of first tokens that it attends to as well
    pages: bool = False  # a paged store may return them in place, as Pages (kernels/attention/arguments.py)
    max_exact_cache: int | None = None  # tokens up to which cached decoding is exact; set by Block.memory
    # Arrays that depend on positions. None: a store must return every key once, because the mixer reads its keys not
    # only through the mask of a layout.
    rotated: tuple[tuple[str, Position], ...] | None = None
    # A store may select among the earlier keys by their scores (TokenLayout.select): the mask allows all of them, and
    # the scores depend on queries and keys alone.
    selectable: bool = False
    relative: bool = False  # the mask depends on distances alone, so positions may be counted from any token


@dataclass(frozen=True)
class FixedSize:
    """Arrays of a size independent of the sequence length: name -> shape, kept in at least float32."""

    rewinds: ClassVar[bool] = False

    arrays: dict[str, tuple[int, ...]]

    def zeros(self, x: Tensor) -> dict[str, Tensor]:
        """Initial arrays for a batch like x (B, …): name -> zeros (B, *shape)."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return {name: x.new_zeros(len(x), *shape, dtype=wide) for name, shape in self.arrays.items()}


@dataclass(frozen=True)
class PerSource:
    """Arrays with one entry per token of a cross-attention source, written with a row's first tokens."""

    rewinds: ClassVar[bool] = True

    arrays: dict[str, tuple[int, int]]


Declared = PerToken | FixedSize | PerSource | None
Memory = Declared | tuple[Declared, ...]  # a tuple: several kinds; its state has the methods of all


def declarations(memory: Memory) -> tuple[Declared, ...]:
    """The declarations of one body as a tuple."""
    return memory if isinstance(memory, tuple) else (memory,)


def declare_tokens(memory: Memory, **fields: Any) -> Memory:
    """The declarations of a body, with these fields in every PerToken."""
    changed = tuple(replace(d, **fields) if isinstance(d, PerToken) else d for d in declarations(memory))
    return changed if isinstance(memory, tuple) else changed[0]


def exact_cache_limit(memory: tuple[tuple[Memory, ...], ...]) -> int | None:
    """The number of tokens up to which a model's cache is exact, from its declarations; None: no limit."""
    declared = (d for block in memory for body in block for d in declarations(body) if isinstance(d, PerToken))
    return min((d.max_exact_cache for d in declared if d.max_exact_cache is not None), default=None)


def needs_snapshots(memory: tuple[tuple[Memory, ...], ...]) -> bool:
    """Whether only a copy can undo a token: a recurrent state is a sum, and an evicting cache drops other tokens."""
    return any(not d.rewinds for block in memory for body in block for d in declarations(body) if d is not None)


class TokenState(Protocol):
    def extend(self, layout: TokenLayout, **arrays: Tensor) -> tuple:
        """Append arrays (B, heads, L, dim); return all cached (B, heads, S, dim), and the layout with their keys."""
        ...

    def pages(self, layout: TokenLayout, *names: str) -> list[Pages] | None:
        """These arrays in place, for a kernel that appends the new tokens by itself; None: they are not in pages."""
        ...


class FixedState(Protocol):
    def read(self, layout: TokenLayout, **empty: Tensor) -> tuple[Tensor, ...]:
        """The fixed arrays of these rows, or those of `empty` for a row that starts (position 0)."""
        ...

    def write(self, layout: TokenLayout, **arrays: Tensor) -> None:
        """Keep the fixed arrays of these rows."""
        ...


class SourceState(Protocol):
    def read_source(self, layout: TokenLayout, compute: Callable[[Tensor], dict[str, Tensor]]) -> tuple:
        """The arrays (B, heads, S, dim) of the source and the layout with its keys.

        They are computed by `compute` and cached if the layout has a source, else they are read from the cache.
        """
        ...


State = Any  # a TokenState, FixedState or SourceState, by the kind of memory that the mixer declares


class Stateless:
    def extend(self, layout: TokenLayout, **arrays: Tensor) -> tuple:
        return (*arrays.values(), layout)

    def pages(self, layout: TokenLayout, *names: str) -> None:
        return None

    def read(self, layout: TokenLayout, **empty: Tensor) -> tuple[Tensor, ...]:
        return tuple(empty.values())

    def write(self, layout: TokenLayout, **arrays: Tensor) -> None:
        pass

    def read_source(self, layout: TokenLayout, compute: Callable[[Tensor], dict[str, Tensor]]) -> tuple:
        if (source := layout.inputs.source) is None:
            raise ValueError("cross-attention has no source; set it by layout.with_source(...), or pass a state")
        return (*compute(source.x).values(), layout.cross(source.layout))


STATELESS = Stateless()


class FinalState(Stateless):
    """Stateless, but it keeps the fixed arrays that were written last: the final state of a recurrence."""

    def __init__(self) -> None:
        self.arrays: dict[str, Tensor] = {}

    def write(self, layout: TokenLayout, **arrays: Tensor) -> None:
        self.arrays = arrays
