"""A state machine drives the paged store at random; contents and records must agree with a plain list per row.

Slot t of a row holds a hash of its namespace and its tokens up to t, and its recurrent state a hash of all of them. So
a block that is shared wrongly, freed too early or written by two rows gives a wrong value.
"""

from dataclasses import dataclass
from itertools import count
from zlib import crc32

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from regard.engine.stores.base import CannotRewind, Snapshot
from regard.engine.stores.paged import Paged
from regard.layout import TokenLayout
from regard.parts.state import FixedSize, PerToken

ROWS, BLOCK, BLOCKS, CAPACITY = 3, 2, 9, 14
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=5)
PROMPTS = st.one_of(  # most begin alike, so that they share blocks
    st.builds(lambda length, end: [0, 1, 1, 0, 1, 0, 0, 0][:length] + end, st.integers(2, 8), TOKENS), TOKENS
)
NAMESPACES = st.sampled_from(["a", "a", "a", "a", "b", None])
MOSTLY, RARELY = st.sampled_from([True, True, True, False]), st.sampled_from([False] * 7 + [True])


@dataclass
class Sequence:
    label: str  # the namespace, or one that no other request has
    tokens: list[int]
    length: int = 0  # tokens that are computed

    def value(self, length: int) -> float:
        return crc32(repr((self.label, self.tokens[:length])).encode()) + 1.0


def is_busy(machine: "Allocator") -> bool:
    return bool(machine.sequences)


def has_room(machine: "Allocator") -> bool:
    return len(machine.sequences) < ROWS


class Allocator(RuleBasedStateMachine):
    recurrent, steps, hits, evictions = False, 0, 0, 0

    def __init__(self) -> None:
        super().__init__()
        memory = (((PerToken({"k": (1, 1)}), *[FixedSize({"h": (1,)})] * self.recurrent),),)
        self.store = Paged(memory, ROWS, CAPACITY, torch.float64, block=BLOCK, blocks=BLOCKS, states=5)
        self.sequences: dict[int, Sequence] = {}
        self.snapshots: dict[int, Snapshot] = {}
        self.counter = count()

    def row(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.sequences)))

    def free_row(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(set(range(ROWS)) - set(self.sequences))))

    @precondition(has_room)
    @rule(data=st.data(), tokens=PROMPTS, namespace=NAMESPACES, compute=MOSTLY, copy_state=MOSTLY)
    def admit(self, data: st.DataObject, tokens: list[int], namespace: str | None, compute: bool, copy_state: bool):
        row, available = self.free_row(data), self.store.pool.available
        cached = self.store.admit(row, tokens, namespace)
        if cached is None:
            assert -(-len(tokens) // BLOCK) > available and not self.store.owned[row]
            return
        assert 0 <= cached < len(tokens) and (namespace is not None or cached == 0)
        self.sequences[row] = Sequence(namespace or f"alone {next(self.counter)}", tokens, cached)
        if compute:
            self.commit(row, (len(tokens) - 1) // BLOCK * BLOCK - cached, copy_state)
            self.commit(row, len(tokens), False)

    @precondition(is_busy)
    @rule(data=st.data(), count=st.integers(1, 5), copy_state=st.booleans())
    def write(self, data: st.DataObject, count: int, copy_state: bool) -> None:
        """A forward of the next tokens that succeeds."""
        self.commit(self.row(data), count, copy_state)

    @precondition(is_busy)
    @rule(data=st.data(), count=st.integers(1, 5))
    def fail(self, data: st.DataObject, count: int) -> None:
        """A forward that fails after it has written."""
        row = self.row(data)
        self.forward(row, count)
        self.end(row)

    @precondition(is_busy)
    @rule(data=st.data(), more=TOKENS)
    def append(self, data: st.DataObject, more: list[int]) -> None:
        row = self.row(data)
        sequence = self.sequences[row]
        if self.store.reserve(row, len(sequence.tokens) + len(more)):
            sequence.tokens = sequence.tokens + more

    @precondition(is_busy)
    @rule(data=st.data(), finish=MOSTLY, forget=RARELY)
    def release(self, data: st.DataObject, finish: bool, forget: bool) -> None:
        row = self.row(data)
        if finish:
            self.commit(row, CAPACITY, False)
        if forget:
            self.store.forget(row)
        self.end(row)

    @rule(really=RARELY)
    def forget_all(self, really: bool) -> None:
        if really:
            self.store.forget()

    @precondition(is_busy)
    @rule(data=st.data())
    def snapshot(self, data: st.DataObject) -> None:
        row = self.row(data)
        self.snapshots[row] = self.store.snapshot(row)

    @precondition(is_busy)
    @rule(data=st.data(), drop=st.integers(0, 6), ids=TOKENS, use_snapshot=st.booleans())
    def rewind(self, data: st.DataObject, drop: int, ids: list[int], use_snapshot: bool) -> None:
        """Return to an earlier length and continue with other tokens, within the blocks that are left."""
        row = self.row(data)
        sequence, snapshot = self.sequences[row], self.snapshots.get(row) if use_snapshot else None
        snapshot = None if snapshot is None or snapshot.stale else snapshot
        length = max(0, sequence.length - drop) if snapshot is None else snapshot.length
        try:
            self.store.rewind(row, length, snapshot)
        except CannotRewind:
            assert self.recurrent or not self.store.pool.available
            return
        room = len(self.store.owned[row]) * BLOCK - length
        self.sequences[row] = Sequence(sequence.label, sequence.tokens[:length] + ids[:room], length)

    @precondition(lambda self: self.snapshots and has_room(self))
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        row, to = data.draw(st.sampled_from(sorted(self.snapshots))), self.free_row(data)
        snapshot, sequence = self.snapshots[row], self.sequences[row]
        if not snapshot.stale and self.store.fork(row, to, snapshot):
            self.sequences[to] = Sequence(sequence.label, sequence.tokens[: snapshot.length], snapshot.length)

    def end(self, row: int) -> None:
        self.store.release(row)
        del self.sequences[row]
        self.snapshots.pop(row, None)

    def commit(self, row: int, count: int, copy_state: bool) -> None:
        if self.forward(row, count):
            sequence = self.sequences[row]
            self.store.commit(row, sequence.tokens, sequence.length, copy_state)

    def forward(self, row: int, count: int) -> bool:
        sequence = self.sequences[row]
        start, stop = sequence.length, min(sequence.length + count, len(sequence.tokens))
        if stop <= start:
            return False
        layout = TokenLayout(torch.arange(start, stop).unsqueeze(0), rows=torch.tensor([row]))
        ((state,),) = self.store.begin_forward(layout)
        values = torch.tensor([sequence.value(t + 1) for t in range(start, stop)], dtype=torch.float64)
        state.extend(layout, k=values.view(1, 1, -1, 1))
        if self.recurrent:
            state.write(layout, h=values[-1:].view(1, 1))
        sequence.length = stop
        return True

    @invariant()
    def records_are_consistent(self) -> None:
        type(self).steps += 1
        self.store.check()
        assert all(bool(blocks) <= (row in self.sequences) for row, blocks in enumerate(self.store.owned))

    @invariant()
    def rows_hold_their_sequences(self) -> None:
        keys = self.store.per_token[0].arrays["k"].view(-1)
        for row, sequence in self.sequences.items():
            expected = [sequence.value(t + 1) for t in range(sequence.length)]
            blocks = self.store.block_table[row]
            assert keys[self.store.slots(blocks)][: sequence.length].tolist() == expected
            assert int(self.store.table.lengths[row]) == sequence.length
            if self.recurrent and sequence.length:
                state = next(storage for storage in self.store.storages if "h" in storage.arrays)
                assert float(state.arrays["h"][row]) == expected[-1]

    def teardown(self) -> None:
        metrics, kind = self.store.metrics(), type(self)
        kind.hits, kind.evictions = kind.hits + metrics["prefix_hit_tokens"], kind.evictions + metrics["evicted_blocks"]


class RecurrentAllocator(Allocator):
    recurrent = True


def drive(machine: type[Allocator], sequences: int) -> None:
    options = settings(max_examples=sequences, stateful_step_count=50, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(machine, settings=options)


@pytest.mark.parametrize("machine", [Allocator, RecurrentAllocator])
def test_random_operations_keep_the_store_consistent(machine: type[Allocator]) -> None:
    machine.hits = machine.evictions = 0
    drive(machine, 100)
    assert machine.hits > 30 and machine.evictions > 60  # the machine reaches what it is to test


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("machine", [Allocator, RecurrentAllocator])
def test_50_000_operations_keep_the_store_consistent(machine: type[Allocator]) -> None:
    machine.steps = 0
    while machine.steps < 25_000:
        drive(machine, 500)
