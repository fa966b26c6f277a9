"""A store whose operations are repeated by other ranks, so that all of them keep the same tokens in the same places.

The scheduler runs on rank 0 only. Rank 0 has a RecordedStore: every call that changes it is recorded and sent with the
next forward. The others have a StoreReplay, which makes the same calls to their own stores. These choose the same
blocks, because a store depends on nothing but its calls. Tokens are sent once, not with every call.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from regard.engine.stores.base import Snapshot, Store
from regard.layout import TokenLayout
from regard.parts.state import State

RecordCall = Callable[..., None]  # name of a method of StoreReplay, its arguments; tensors are keyword arguments


class RecordedStore:
    """All attributes and methods that change nothing are those of the store."""

    def __init__(self, store: Store, record: RecordCall):
        self.store, self.record = store, record
        self.sent = [0] * store.rows  # tokens of each row that the other ranks know
        self.snapshots: weakref.WeakKeyDictionary[Snapshot, int] = weakref.WeakKeyDictionary()
        self.next_snapshot = 0
        self.layout: TokenLayout | None = None  # of the forward that has begun

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def begin_forward(
        self, layout: TokenLayout, span: int | None = None, check: bool = True
    ) -> tuple[tuple[State, ...], ...]:
        states = self.store.begin_forward(layout, span, check)
        self.record(
            "begin_forward", span, check, layout.ordered, layout.consecutive, positions=layout.positions,
            segments=layout.segments, valid=layout.valid, rows=layout.rows,
        )  # fmt: skip
        self.layout = layout
        return states

    def admit(self, row: int, tokens: Sequence[int], namespace: object = None, prompt: int | None = None) -> int | None:
        cached = self.store.admit(row, tokens, namespace, prompt)
        if cached is not None:  # otherwise nothing has changed
            # A namespace is compared by its repr, and may hold objects that exist in this process only.
            self.record("admit", row, list(tokens), None if namespace is None else repr(namespace), prompt)
            self.sent[row] = len(tokens)
        return cached

    def commit(self, row: int, tokens: Sequence[int], length: int, copy_state: bool = False) -> None:
        self.store.commit(row, tokens, length, copy_state)
        self.record("commit", row, list(tokens[self.sent[row] : length]), length, copy_state)
        self.sent[row] = max(self.sent[row], length)

    def forget(self, row: int | None = None) -> None:
        self.store.forget(row)
        self.record("forget", row)

    def upload(self) -> None:
        self.store.upload()  # the others upload with the next forward

    def reserve(self, row: int, length: int) -> bool:
        done = self.store.reserve(row, length)
        if done:
            self.record("reserve", row, length)
        return done

    def snapshot(self, row: int) -> Snapshot:
        snapshot = self.store.snapshot(row)
        number = self.snapshots[snapshot] = self.next_snapshot
        self.next_snapshot += 1
        self.record("snapshot", row, number)
        weakref.finalize(snapshot, self.record, "drop", number)
        return snapshot

    def rewind(self, row: int, length: int, snapshot: Snapshot | None = None) -> None:
        self.store.rewind(row, length, snapshot)
        self.record("rewind", row, length, None if snapshot is None else self.snapshots[snapshot])
        self.sent[row] = min(self.sent[row], length)

    def fork(self, row: int, to: int, snapshot: Snapshot) -> bool:
        done = self.store.fork(row, to, snapshot)
        if done:
            self.record("fork", row, to, self.snapshots[snapshot])
            self.sent[to] = min(self.sent[row], snapshot.length)
        return done

    def release(self, row: int) -> None:
        self.store.release(row)
        self.record("release", row)
        self.sent[row] = 0


class StoreReplay:
    """Repeats the calls of a RecordedStore on the store of another rank."""

    def __init__(self, store: Store):
        self.store = store
        self.tokens: list[list[int]] = [[] for _ in range(store.rows)]
        self.snapshots: dict[int, Snapshot] = {}
        self.layout: TokenLayout | None = None
        self.states: Any = None

    def begin_forward(
        self, span: int | None, check: bool, ordered: bool, consecutive: bool, *, positions: Tensor,
        segments: Tensor | None, valid: Tensor | None, rows: Tensor | None,
    ) -> None:  # fmt: skip
        self.layout = TokenLayout(positions, segments, valid, rows, ordered=ordered, consecutive=consecutive)
        self.states = self.store.begin_forward(self.layout, span, check)

    def admit(self, row: int, tokens: list[int], namespace: str | None, prompt: int | None) -> None:
        self.store.admit(row, tokens, namespace, prompt)
        self.tokens[row] = tokens

    def commit(self, row: int, new: list[int], length: int, copy_state: bool) -> None:
        self.tokens[row] += new
        self.store.commit(row, self.tokens[row], length, copy_state)

    def forget(self, row: int | None) -> None:
        self.store.forget(row)

    def reserve(self, row: int, length: int) -> None:
        self.store.reserve(row, length)

    def snapshot(self, row: int, number: int) -> None:
        self.snapshots[number] = self.store.snapshot(row)

    def drop(self, number: int) -> None:
        self.snapshots.pop(number, None)

    def rewind(self, row: int, length: int, number: int | None) -> None:
        self.store.rewind(row, length, None if number is None else self.snapshots[number])
        del self.tokens[row][length:]

    def fork(self, row: int, to: int, number: int) -> None:
        snapshot = self.snapshots[number]
        self.store.fork(row, to, snapshot)
        self.tokens[to] = self.tokens[row][: snapshot.length]

    def release(self, row: int) -> None:
        self.store.release(row)
        self.tokens[row] = []
