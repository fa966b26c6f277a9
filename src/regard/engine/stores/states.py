"""A state for all that a model declares to remember (parts/state.py), in the nesting in which forward takes them."""

from collections.abc import Callable, Iterator

import torch

from regard.engine.stores.fixed_size import RowState
from regard.engine.stores.ring import RingBuffer, RingState
from regard.engine.stores.row_table import RowTable
from regard.engine.stores.source_keys import SourceRows
from regard.parts.state import STATELESS, Declared, FixedSize, PerSource, PerToken, State, each


def build_states(
    memory,
    rows: RowTable,
    capacity: int,
    slack: int,
    source: int,
    dtype: torch.dtype,
    per_token: Callable[[PerToken], State],
) -> tuple[tuple[State, ...], ...]:
    """What is seen only from near goes into a ring, where that is smaller; what remembers nothing gets FRESH."""
    rings: dict[tuple[int, int], RingBuffer] = {}

    def make(declared: Declared) -> State:
        match declared:
            case PerToken(window=int(window), first=first) if first + window + slack < capacity:
                if (window, first) not in rings:
                    rings[window, first] = RingBuffer(window, first, slack, rows)
                return RingState(declared, rings[window, first], dtype)
            case PerToken():
                return per_token(declared)
            case FixedSize():
                return RowState(declared, rows, dtype)
            case PerSource():
                return SourceRows(declared, rows, source, dtype)
        return STATELESS

    def together(made: list[State]) -> State:
        return made[0] if len(made) == 1 else Together(*made)

    return tuple(tuple(together([make(d) for d in each(one)]) for one in block) for block in memory)


class Together:
    """The state of a body that declares several kinds: it has the methods of all."""

    def __init__(self, *parts: State):
        self.parts = parts
        for part in parts:
            for method in ("extend", "read", "write", "recall"):
                if hasattr(part, method):
                    setattr(self, method, getattr(part, method))


def leaves(states: tuple[tuple[State, ...], ...]) -> Iterator[State]:
    """All states, kind by kind."""
    for state in (state for block in states for state in block):
        yield from state.parts if isinstance(state, Together) else (state,)
