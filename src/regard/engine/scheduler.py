"""The scheduler: continuous batching, first come, first served.

    waiting ── admit (a free row, and space for all tokens) ──▶ running ── finish
       ▲                                                           │
       └────── preempt (the latest arrival, if space runs out) ────┘

A step is a decode batch (requests with one pending token) and a prefill batch (at most `chunk` tokens of the others, or
one whole source), so a long prompt does not block decoding. A preempted request keeps its tokens but not its row:
source, prompt and new tokens are recomputed later, except for a prefix that the store still has, with the same result.
Of several requests with the same prompt, the first computes it while the others wait.
Yu et al. 2022 (Orca), Kwon et al. 2023 (vLLM), Agrawal et al. 2023 (chunked prefill).
"""

from bisect import insort
from collections import deque
from collections.abc import Callable

from regard.engine.request import Request
from regard.engine.stores.base import Store

ScheduledBatch = list[tuple[Request, int]]  # requests, and how many tokens of each


class Scheduler:
    def __init__(self, store: Store, chunk: int, namespace: Callable[[Request], object] | None):
        """namespace: requests with equal ones may share cached prefixes; None: no request shares any."""
        self.store, self.chunk, self.namespace = store, chunk, namespace or (lambda request: None)
        self.border = store.prompt_border if namespace else 1
        self.waiting: deque[Request] = deque()  # in order of arrival
        self.running: list[Request] = []  # in order of arrival
        self.free_rows = set(range(store.rows))
        self.preemptions = 0

    def plan(self) -> list[ScheduledBatch]:
        """The batches of the next step; a request is in at most one."""
        self.reserve_space()
        self.admit()
        self.store.upload()
        return [batch for batch in (self.decode_batch(), self.prefill_batch()) if batch]

    def reserve_space(self) -> None:
        """Reserve space for the next token of every running request; preempt the latest arrivals if there is none."""
        for request in list(self.running):
            while request.row is not None and not self.store.reserve(request.row, len(request.tokens)):
                self.preempt(self.running[-1])

    def admit(self) -> None:
        """Admit waiting requests in order of arrival, while there are rows and space."""
        for request in [request for request in self.waiting if not request.held]:
            if not self.free_rows:
                return
            row = min(self.free_rows)  # low rows first: a batch of rows 0 … B-1 is a slice of the store
            cached = self.store.admit(row, request.tokens, self.namespace(request))
            if cached is None:
                return
            self.free_rows.remove(row)
            self.waiting.remove(request)
            request.row, request.cached = row, cached
            insort(self.running, request, key=arrival)

    def find_leader(self, request: Request) -> Request | None:
        """The first request with the same prompt, if that is not computed yet. Its prefix can be shared then."""
        if not 0 < self.store.shared_block < len(request.ids):
            return None
        queued = (other for other in (*self.running, *self.waiting) if not other.new)
        leader = next((other for other in queued if other.ids == request.ids), None)
        namespace = None if leader is None else self.namespace(request)
        return leader if leader is not None and namespace == self.namespace(leader) is not None else None

    def decode_batch(self) -> ScheduledBatch:
        return isolate([(r, 1) for r in self.running if r.pending == 1 and not r.pending_source])

    def prefill_batch(self) -> ScheduledBatch:
        """Requests with several pending tokens or a pending source, as many as fit into `chunk` tokens with padding."""
        batch: ScheduledBatch = []
        longest = 0
        for request in self.running:
            if request.pending > 1 or request.pending_source:
                length = chunk_length(request, self.chunk, self.border)
                longest = max(longest, length, request.pending_source)
                if batch and (len(batch) + 1) * longest > self.chunk:
                    break
                batch.append((request, length))
        return isolate(batch)

    def advance(self, batch: ScheduledBatch) -> None:
        """Record a forward of this batch that has succeeded."""
        for request, length in batch:
            request.cached += length
            assert request.row is not None
            self.store.commit(request.row, request.tokens, request.cached, copy_state=request.pending > 0)

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
        if request.error is not None:  # other requests must not inherit keys and values that may be wrong
            self.store.forget(request.row)
        self.store.release(request.row)
        self.free_rows.add(request.row)
        request.row = None


def arrival(request: Request) -> int:
    return request.arrival


def chunk_length(request: Request, limit: int, border: int) -> int:
    """How many pending tokens are computed next: at most `limit`, and up to a multiple of `border` if one is in reach.

    The last border before the end of the prompt is one of them, so that the same prompt can start there again.
    """
    end = min(request.cached + limit, len(request.tokens))
    if border > 1:
        last = min(end, len(request.tokens) - 1) // border * border
        end = last if last > request.cached else end
    return end - request.cached


def isolate(batch: ScheduledBatch) -> ScheduledBatch:
    """A batch of only the first isolated request, if there is one; otherwise the whole batch."""
    return next(([pair] for pair in batch if pair[0].isolated), batch)
