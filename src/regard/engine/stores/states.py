"""Storage for every state that a model declares (parts/state.py), and the states of one forward on top of it.

A storage object lives as long as its store. `bind` returns the state that a layer uses in one forward.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from regard.engine.stores.base import ModelMemory
from regard.engine.stores.fixed_size import FixedStorage, SourceStorage
from regard.engine.stores.ring import RingBuffer, RingStorage
from regard.engine.stores.rows import RowTable
from regard.layout import TokenLayout
from regard.parts.state import STATELESS, Declared, FixedSize, PerSource, PerToken, State, declarations


class Storage(Protocol):
    arrays: dict[str, Tensor]

    def bind(self, layout: TokenLayout, placement: Any) -> State:
        """The state of one forward; `placement` is what the store's `place` returned for these tokens."""
        ...


class NoStorage:
    """For a body without a state."""

    def __init__(self) -> None:
        self.arrays: dict[str, Tensor] = {}

    def bind(self, layout: TokenLayout, placement: Any) -> State:
        return STATELESS


@dataclass(frozen=True)
class Storages:
    """All storage of a store: nested as forward expects its states."""

    nested: tuple[tuple[tuple[Storage, ...], ...], ...]  # per block, per sublayer, one or several kinds of state
    rings: tuple[RingBuffer, ...]

    def bind(self, layout: TokenLayout, placement: Any) -> tuple[tuple[State, ...], ...]:
        rings = {ring: ring.place(layout) for ring in self.rings}

        def one(storage: Storage) -> State:
            return storage.bind(layout, rings[storage.ring] if isinstance(storage, RingStorage) else placement)

        return tuple(tuple(combine([one(s) for s in kinds]) for kinds in block) for block in self.nested)

    def __iter__(self) -> Iterator[Storage]:
        return (storage for block in self.nested for kinds in block for storage in kinds)


def build_storages(
    memory: ModelMemory,
    rows: RowTable,
    capacity: int,
    slack: int,
    source: int,
    dtype: torch.dtype,
    per_token: Callable[[PerToken], Storage],
) -> Storages:
    """Layers that attend to a window keep their tokens in a ring buffer if that is smaller; others as `per_token`."""
    rings: dict[tuple[int, int], RingBuffer] = {}

    def make(declared: Declared) -> Storage:
        match declared:
            case PerToken(window=int(window), first=first) if first + window + slack < capacity:
                if (window, first) not in rings:
                    rings[window, first] = RingBuffer(window, first, slack, rows)
                return RingStorage(declared, rings[window, first], dtype)
            case PerToken():
                return per_token(declared)
            case FixedSize():
                return FixedStorage(declared, rows, dtype)
            case PerSource():
                return SourceStorage(declared, rows, source, dtype)
        return NoStorage()

    nested = tuple(tuple(tuple(make(d) for d in declarations(one)) for one in block) for block in memory)
    return Storages(nested, tuple(rings.values()))


def combine(states: list[State]) -> State:
    return states[0] if len(states) == 1 else CombinedState(*states)


class CombinedState:
    """The state of a body that declares several kinds: it has the methods of all."""

    def __init__(self, *states: State):
        for state in states:
            for method in ("extend", "read", "write", "recall"):
                if hasattr(state, method):
                    setattr(self, method, getattr(state, method))
