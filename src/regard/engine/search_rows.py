"""Rows of a store for a search, which decodes several continuations of one prompt outside of the scheduler's batches.

Other requests are preempted if the search needs their rows or blocks. They resume when there is space, with the same
result.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import fields

from regard.engine.request import GenerationError, Sampling
from regard.engine.scheduler import Scheduler
from regard.engine.stores.base import Snapshot

UNUSED = {"top_k", "top_p", "min_p", "typical_p", "seed", "top_logprobs", "prompt_logprobs", "grammar"}


class SearchRows:
    def __init__(self, scheduler: Scheduler):
        self.scheduler, self.store = scheduler, scheduler.store
        self.free: list[int] = []

    def check(self, name: str, count: int) -> None:
        """ValueError if the store does not have so many rows. name: the setting that asks for them."""
        if count > self.store.rows:
            raise ValueError(f"{name}={count} needs as many rows, but the engine has {self.store.rows}; lower it")

    @contextmanager
    def take(self, count: int) -> Generator[None]:
        """Take rows from the scheduler, and give them back empty."""
        while len(self.scheduler.free_rows) < count:
            self.preempt_last()
        rows = sorted(self.scheduler.free_rows)[:count]
        self.scheduler.free_rows.difference_update(rows)
        self.free = list(reversed(rows))
        try:
            yield
        finally:
            for row in rows:
                self.store.release(row)
            self.scheduler.free_rows.update(rows)

    def admit(self, tokens: list[int]) -> int:
        """A row with space for these tokens."""
        row = self.free.pop()
        while self.store.admit(row, tokens) is None:
            self.make_space()
        return row

    def reserve(self, row: int, length: int) -> None:
        while not self.store.reserve(row, length):
            self.make_space()

    def fork(self, snapshot: Snapshot) -> int:
        """A row that continues from this snapshot of another row."""
        row = self.free.pop()
        while not self.store.fork(snapshot.row, row, snapshot):
            self.make_space()
        return row

    def release(self, row: int) -> None:
        self.store.release(row)
        self.free.append(row)

    def make_space(self) -> None:
        if not self.scheduler.running:
            raise GenerationError("the store has no space for this search; open a larger store, or search less widely")
        self.preempt_last()

    def preempt_last(self) -> None:
        if not self.scheduler.read_tokens():  # they may end requests; a preempted one needs its own
            self.scheduler.preempt(self.scheduler.running[-1])


def check_search(sampling: Sampling) -> None:
    """Raise ValueError if settings have no meaning in a search, which does not sample."""
    if sampling.temperature != 0:
        raise ValueError(f"temperature={sampling.temperature}, but a search does not sample; use temperature=0")
    for field in fields(sampling):
        if field.name in UNUSED and getattr(sampling, field.name) != field.default:
            raise ValueError(f"{field.name}={getattr(sampling, field.name)!r} has no meaning in a search; leave it out")
