"""Who runs in the next step: continuous batching, first come, first served.

    waiting ── admit (a free row, and room for all its tokens) ──▶ running ── finish ──▶ gone
       ▲                                                            │
       └───────────── preempt (the youngest, when room runs out) ───┘

A step is a decode batch (all with one token to read) and a prefill batch (at most `chunk` tokens of those with more):
a long prompt never stops the others. Who is preempted keeps its tokens, loses its memory, and later reads prompt and
answer again: what it says does not change. Yu et al. 2022 (Orca), Kwon et al. 2023 (vLLM), Agrawal et al. 2023
(chunked prefill).
"""

from bisect import insort
from collections import deque

from regard.engine.request import Request
from regard.engine.stores.base import Store

ScheduledBatch = list[tuple[Request, int]]  # who runs, and how many of its tokens


class Scheduler:
    def __init__(self, store: Store, chunk: int):
        self.store, self.chunk = store, chunk
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # both by age, the oldest first
        self.free_rows = set(range(store.rows))
        self.preemptions = 0

    def plan(self) -> list[ScheduledBatch]:
        """The batches of the next step; no request is in two of them."""
        self.grow()
        self.admit()
        return [batch for batch in (self.decode(), self.prefill()) if batch]

    def grow(self) -> None:
        """Room for the next token of all who run, oldest first; while there is none, the youngest gives way."""
        for request in list(self.running):
            while request.row is not None and not self.store.reserve(request.row, len(request.tokens)):
                self.preempt(self.running[-1])

    def admit(self) -> None:
        """From the front of the queue only, so nobody is overtaken."""
        while self.waiting and self.free_rows:
            row = min(self.free_rows)  # low rows first: a batch of rows 0 … B-1 is a slice of the store
            if not self.store.reserve(row, len(self.waiting[0].tokens)):
                return
            self.free_rows.remove(row)
            request = self.waiting.popleft()
            request.row = row
            insort(self.running, request, key=age)

    def decode(self) -> ScheduledBatch:
        return apart([(r, 1) for r in self.running if r.pending == 1])

    def prefill(self) -> ScheduledBatch:
        """The oldest that have a prompt to read, as many as fit into `chunk` tokens with padding."""
        batch: ScheduledBatch = []
        longest = 0
        for request in self.running:
            if request.pending > 1:
                length = min(request.pending, self.chunk)
                longest = max(longest, length)
                if batch and (len(batch) + 1) * longest > self.chunk:
                    break
                batch.append((request, length))
        return apart(batch)

    def preempt(self, request: Request) -> None:
        """Back to the queue, among those who wait by age."""
        self.remove(request)
        request.done = 0
        self.preemptions += 1
        insort(self.waiting, request, key=age)

    def remove(self, request: Request) -> None:
        """Take it out, running or waiting, and give its room back."""
        if request.row is None:
            self.waiting.remove(request)
            return
        self.running.remove(request)
        self.store.release(request.row)
        self.free_rows.add(request.row)
        request.row = None


def age(request: Request) -> int:
    return request.number


def apart(batch: ScheduledBatch) -> ScheduledBatch:
    """Suspects run one at a time, and without the others."""
    return next(([pair] for pair in batch if pair[0].alone), batch)
