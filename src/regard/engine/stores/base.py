"""The interface of a store: it keeps the states of a model's layers for a fixed number of rows, one sequence per row.

    states = store.begin_forward(layout)           assign slots to the new tokens
    logits = model(tokens, layout, states)         each layer appends to its state and reads it

Every forward begins with `begin_forward`; its states serve that forward only. A row can return to an earlier length:

    snapshot = store.snapshot(row)                 after n tokens
    store.rewind(row, n, snapshot)                 drop the tokens since then, e.g. rejected draft tokens
    store.fork(row, to, snapshot)                  continue the same prefix in another row

Requests that start with the same tokens can share them, if the store keeps the prefixes of sequences:

    cached = store.admit(row, tokens, namespace)   reserve space; the first `cached` tokens are in the row already
    store.commit(row, tokens, length)              after a forward: these tokens are computed, other rows may use them

Per-token arrays rewind without a snapshot. A recurrent state is a sum over tokens, and a ring buffer overwrites old
tokens: both are copied into the snapshot. Their size does not depend on the length of the sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from regard.layout import TokenLayout
from regard.parts.state import State

SLACK = 16  # tokens that every ring buffer can rewind; speculation drafts fewer
ModelMemory = Any  # the states that Model.memory() declares: per block, per sublayer (parts/state.py)


@dataclass(eq=False)
class Snapshot:
    row: int
    length: int
    arrays: list[list[Tensor]]  # of every state that cannot rewind by itself
    stale: bool = False  # the row has been rewound further or restarted since, so its tokens may differ


class CannotRewind(ValueError):
    """A row cannot return to an earlier length: a state has overwritten tokens that are needed there."""


class Store(Protocol):
    rows: int  # sequences kept at once
    capacity: int  # tokens per row
    storages: Any  # one per state of every layer (states.py), each with its `arrays` by name
    max_tokens: int  # tokens that one row can hold if all other rows are empty
    max_span: int  # slots of a row that a forward reads at most
    in_place: bool  # a decode step reads the tokens of its row only, so its cost does not depend on the span
    shared_block: int  # rows share prefixes in multiples of this many tokens; 0: they share none
    needs_snapshots: bool  # a row cannot drop its last tokens without a snapshot
    prompt_border: int  # a prompt is reused from forwards that end at multiples of this many tokens

    def begin_forward(
        self, layout: TokenLayout, span: int | None = None, check: bool = True
    ) -> tuple[tuple[State, ...], ...]:
        """States for one forward of these tokens, in the nesting that Model.forward expects.

        span: how many slots of each row are read; None: all. check: raise ValueError if the tokens do not continue
        their rows' sequences; costs a synchronization on a GPU. The positions of a row are consecutive, in order, and
        start at its length. If they start earlier, the row is rewound to the first of them, as by `rewind` without a
        snapshot: always possible for position 0 (a new sequence), otherwise CannotRewind if a layer cannot.
        Without the check, call `rewind` or `release` first, and `reserve` in any store.
        """
        ...

    def admit(
        self, row: int, tokens: Sequence[int | bytes], namespace: object = None, prompt: int | None = None
    ) -> int | None:
        """Reserve space for these tokens in an empty row; None, and nothing reserved, if there is too little.

        Returns how many of the first tokens the row holds already, because another row has committed them in an equal
        namespace: a value with a unique `repr`, None: the row shares nothing. The last token is never among them.
        prompt: how many of the tokens are the prompt, for a cache that evicts after it; None: all.
        """
        ...

    def commit(self, row: int, tokens: Sequence[int | bytes], length: int, copy_state: bool = False) -> None:
        """Offer the first `length` tokens of the row to other rows. The forwards of these tokens have succeeded.

        copy_state: also copy the states that cannot rewind, if length is a multiple of `prompt_border`; other rows can
        continue only there.
        """
        ...

    def forget(self, row: int | None = None) -> None:
        """Offer a row's tokens to no other row any more; None: those of all rows, for example for new weights."""
        ...

    def upload(self) -> None:
        """Copy to the device what has changed on the host. `begin_forward` does it, but not inside a compiled graph."""
        ...

    def reserve(self, row: int, length: int) -> bool:
        """Allocate space for this many tokens of a row; False, and nothing allocated, if there is too little."""
        ...

    def snapshot(self, row: int) -> Snapshot:
        """A copy of the row's states that cannot rewind by themselves, for `rewind` and `fork`."""
        ...

    def rewind(self, row: int, length: int, snapshot: Snapshot | None = None) -> None:
        """Drop a row's tokens from this position on; CannotRewind if a layer cannot without a snapshot."""
        ...

    def fork(self, row: int, to: int, snapshot: Snapshot) -> bool:
        """Continue from a snapshot of `row` in the empty row `to`; False if there is too little space."""
        ...

    def release(self, row: int) -> None:
        """Empty a row and free its space."""
        ...

    def metrics(self) -> dict[str, int]:
        """Counters for monitoring."""
        ...

    def check(self) -> None:
        """Raise AssertionError if the store's records contradict one another; for tests, since it reads all arrays."""
        ...


class OpenStore(Protocol):
    """The constructor of a store. Options of only one store are further keyword arguments with defaults."""

    def __call__(
        self, memory: ModelMemory, rows: int, capacity: int, dtype: torch.dtype, device: torch.device | str = "cpu",
        source: int = 0, slack: int = SLACK,
    ) -> Store:  # fmt: skip
        """source: tokens of the longest source. slack: tokens that ring buffers can rewind."""
        ...
