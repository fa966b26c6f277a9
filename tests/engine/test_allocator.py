"""A state machine drives the paged store at random; contents and records must agree with a plain list per row.

Slot t of a row holds a hash of its namespace and its tokens up to t, and its recurrent state a hash of all of them. So
a block that is shared wrongly, freed too early or written by two rows gives a wrong value.
"""

import random
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
PICKS = st.integers(0, ROWS * ROWS - 1)
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

    def row(self, pick: int) -> int:
        return sorted(self.sequences)[pick % len(self.sequences)]

    def free_row(self, pick: int) -> int:
        free = sorted(set(range(ROWS)) - set(self.sequences))
        return free[pick % len(free)]

    @precondition(has_room)
    @rule(pick=PICKS, tokens=PROMPTS, namespace=NAMESPACES, compute=MOSTLY, copy_state=MOSTLY)
    def admit(self, pick: int, tokens: list[int], namespace: str | None, compute: bool, copy_state: bool):
        row, available = self.free_row(pick), self.store.pool.available
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
    @rule(pick=PICKS, count=st.integers(1, 5), copy_state=st.booleans())
    def write(self, pick: int, count: int, copy_state: bool) -> None:
        """A forward of the next tokens that succeeds."""
        self.commit(self.row(pick), count, copy_state)

    @precondition(is_busy)
    @rule(pick=PICKS, count=st.integers(1, 5))
    def fail(self, pick: int, count: int) -> None:
        """A forward that fails after it has written."""
        row = self.row(pick)
        self.forward(row, count)
        self.end(row)

    @precondition(is_busy)
    @rule(pick=PICKS, more=TOKENS)
    def append(self, pick: int, more: list[int]) -> None:
        row = self.row(pick)
        sequence = self.sequences[row]
        if self.store.reserve(row, len(sequence.tokens) + len(more)):
            sequence.tokens = sequence.tokens + more

    @precondition(is_busy)
    @rule(pick=PICKS, finish=MOSTLY, forget=RARELY)
    def release(self, pick: int, finish: bool, forget: bool) -> None:
        row = self.row(pick)
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
    @rule(pick=PICKS)
    def snapshot(self, pick: int) -> None:
        row = self.row(pick)
        self.snapshots[row] = self.store.snapshot(row)

    @precondition(is_busy)
    @rule(pick=PICKS, drop=st.integers(0, 6), ids=TOKENS, use_snapshot=st.booleans())
    def rewind(self, pick: int, drop: int, ids: list[int], use_snapshot: bool) -> None:
        """Return to an earlier length and continue with other tokens, within the blocks that are left."""
        row = self.row(pick)
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
    @rule(pick=PICKS)
    def fork(self, pick: int) -> None:
        row, to = sorted(self.snapshots)[pick % len(self.snapshots)], self.free_row(pick // ROWS)
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


def has_snapshot(machine: "Allocator") -> bool:
    return bool(machine.snapshots) and has_room(machine)


def random_prompt(rng: random.Random) -> list[int]:
    return [0, 1, 1, 0, 1, 0, 0, 0][: rng.choice([0, 2, 4, 6, 8])] + random_tokens(rng)


def random_tokens(rng: random.Random) -> list[int]:
    return rng.choices((0, 1), k=rng.randint(1, 5))


def any_row(rng: random.Random) -> int:
    return rng.randrange(ROWS * ROWS)


OPERATIONS = {  # those of the state machine: when they can run, and random arguments
    "admit": (
        has_room,
        lambda rng: (
            any_row(rng), random_prompt(rng), rng.choice(["a", "a", "a", "a", "b", None]), rng.random() < 0.75,
            rng.random() < 0.75,
        ),
    ),
    "write": (is_busy, lambda rng: (any_row(rng), rng.randint(1, 5), rng.random() < 0.5)),
    "fail": (is_busy, lambda rng: (any_row(rng), rng.randint(1, 5))),
    "append": (is_busy, lambda rng: (any_row(rng), random_tokens(rng))),
    "release": (is_busy, lambda rng: (any_row(rng), rng.random() < 0.75, rng.random() < 0.125)),
    "forget_all": (lambda machine: True, lambda rng: (rng.random() < 0.125,)),
    "snapshot": (is_busy, lambda rng: (any_row(rng),)),
    "rewind": (is_busy, lambda rng: (any_row(rng), rng.randint(0, 6), random_tokens(rng), rng.random() < 0.5)),
    "fork": (has_snapshot, lambda rng: (any_row(rng),)),
}  # fmt: skip


def run_random(machine: Allocator, seed: int, steps: int) -> None:
    rng = random.Random(seed)
    for _ in range(steps):
        possible = [name for name, (can_run, _) in OPERATIONS.items() if can_run(machine)]
        name = rng.choice([*possible, "admit"] if has_room(machine) else possible)
        getattr(machine, name)(*OPERATIONS[name][1](rng))
        machine.records_are_consistent()
        machine.rows_hold_their_sequences()
    machine.teardown()


@pytest.mark.parametrize("machine", [Allocator, RecurrentAllocator])
def test_random_operations_keep_the_store_consistent(machine: type[Allocator]) -> None:
    """By seeds, not by hypothesis: what that generates depends on the modules which other tests have imported."""
    machine.hits = machine.evictions = 0
    for seed in range(25):
        run_random(machine(), seed, 50)
    assert machine.hits > 30 and machine.evictions > 60  # the machine reaches what it is to test


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("machine", [Allocator, RecurrentAllocator])
def test_50_000_operations_keep_the_store_consistent(machine: type[Allocator]) -> None:
    options = settings(max_examples=500, stateful_step_count=50, suppress_health_check=list(HealthCheck))
    machine.steps = 0
    run_state_machine_as_test(machine, settings=options)
    for seed in count():
        if machine.steps >= 25_000:
            break
        run_random(machine(), seed, 50)
