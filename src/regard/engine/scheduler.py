"""The scheduler: continuous batching, first come, first served.

    waiting ── admit (a free row, and space for all tokens) ──▶ running ── finish
       ▲                                                           │
       └────── preempt (the latest arrival, if space runs out) ────┘

A step is a decode batch (requests with one pending token) and a prefill batch (at most `chunk` tokens of the others, or
one whole source), so a long prompt does not block decoding. A preempted request keeps its tokens but not its cache;
source, prompt and new tokens are recomputed later, with the same result. Yu et al. 2022 (Orca), Kwon et al. 2023
(vLLM), Agrawal et al. 2023 (chunked prefill).
"""

from bisect import insort
from collections import deque

from regard.engine.request import Request
from regard.engine.stores.base import Store

ScheduledBatch = list[tuple[Request, int]]  # requests, and how many tokens of each


class Scheduler:
    def __init__(self, store: Store, chunk: int):
        self.store, self.chunk = store, chunk
        self.waiting: deque[Request] = deque()  # in order of arrival
        self.running: list[Request] = []  # in order of arrival
        self.free_rows = set(range(store.rows))
        self.preemptions = 0

    def plan(self) -> list[ScheduledBatch]:
        """The batches of the next step; a request is in at most one."""
        self.reserve_space()
        self.admit()
        return [batch for batch in (self.decode_batch(), self.prefill_batch()) if batch]

    def reserve_space(self) -> None:
        """Reserve space for the next token of every running request; preempt the latest arrivals if there is none."""
        for request in list(self.running):
            while request.row is not None and not self.store.reserve(request.row, len(request.tokens)):
                self.preempt(self.running[-1])

    def admit(self) -> None:
        """Admit waiting requests in order of arrival, while there are rows and space."""
        while self.waiting and self.free_rows:
            row = min(self.free_rows)  # low rows first: a batch of rows 0 … B-1 is a slice of the store
            if not self.store.reserve(row, len(self.waiting[0].tokens)):
                return
            self.free_rows.remove(row)
            request = self.waiting.popleft()
            request.row = row
            insort(self.running, request, key=arrival)

    def decode_batch(self) -> ScheduledBatch:
        return isolate([(r, 1) for r in self.running if r.pending == 1 and not r.pending_source])

    def prefill_batch(self) -> ScheduledBatch:
        """Requests with several pending tokens or a pending source, as many as fit into `chunk` tokens with padding."""
        batch: ScheduledBatch = []
        longest = 0
        for request in self.running:
            if request.pending > 1 or request.pending_source:
                length = min(request.pending, self.chunk)
                longest = max(longest, length, request.pending_source)
                if batch and (len(batch) + 1) * longest > self.chunk:
                    break
                batch.append((request, length))
        return isolate(batch)

    def preempt(self, request: Request) -> None:
        """Free the request's row and put it back into the queue, in order of arrival."""
        self.remove(request)
        request.cached = 0
        self.preemptions += 1
        insort(self.waiting, request, key=arrival)

    def remove(self, request: Request) -> None:
        """Remove a running or waiting request, and free its row."""
        if request.row is None:
            self.waiting.remove(request)
            return
        self.running.remove(request)
        self.store.release(request.row)
        self.free_rows.add(request.row)
        request.row = None


def arrival(request: Request) -> int:
    return request.arrival


def isolate(batch: ScheduledBatch) -> ScheduledBatch:
    """A batch of only the first isolated request, if there is one; otherwise the whole batch."""
    return next(([pair] for pair in batch if pair[0].isolated), batch)
