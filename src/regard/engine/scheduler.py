"""The scheduler: continuous batching with a budget of tokens per step.

    waiting ── admit (a free row, and space for all tokens) ──▶ running ── finish
       ▲                                                           │
       └────── preempt (the last in rank, if space runs out) ──────┘

A step is a decode batch (all requests with one pending token) and a prefill batch of the others, or one whole source.
Together they have at most `chunk` tokens, but a quarter of these is always left for prefill: a long prompt does not
block decoding, and many decoding requests do not block a prompt. Requests are admitted in the order of waiting.py. The
rank of running ones is by priority, then by arrival. A preempted request keeps its tokens but not its row: source,
prompt and new tokens are recomputed later, except for a prefix that the store still has, with the same result. Of
several requests with the same prompt, the first computes it while the others wait.
Yu et al. 2022 (Orca), Kwon et al. 2023 (vLLM), Agrawal et al. 2023 (chunked prefill).
"""

from bisect import insort
from collections.abc import Callable
from time import monotonic

from regard.engine.namespace import sharing_key
from regard.engine.request import Request
from regard.engine.stores.base import Store
from regard.engine.waiting import WaitingQueue

ScheduledBatch = list[tuple[Request, int]]  # requests, and how many tokens of each


class Scheduler:
    def __init__(
        self,
        store: Store,
        chunk: int,
        namespace: Callable[[Request], object] | None,
        read_tokens: Callable[[], bool] = lambda: False,
        can_run: Callable[[Request, list[Request]], bool] = lambda request, running: True,
    ):
        """namespace: requests with equal ones may share cached prefixes; None: no request shares any.

        read_tokens: reads the tokens that are computed but not read yet; False if there are none. Called before a
        request is preempted: it needs its tokens to be recomputed, or has finished already.
        can_run: whether there is a slot for the adapter of a request beside those of the running ones.
        """
        self.read_tokens, self.can_run = read_tokens, can_run
        self.store, self.chunk = store, chunk
        self.namespace, self.shares = namespace or (lambda request: None), namespace is not None
        self.border = store.prompt_border if namespace else 1
        self.waiting = WaitingQueue()
        self.running: list[Request] = []  # in order of rank
        self.free_rows = set(range(store.rows))
        self.preemptions = 0

    def plan(self) -> list[ScheduledBatch]:
        """The batches of the next step; a request is in at most one."""
        self.reserve_space()
        self.admit()
        self.store.upload()
        decode: ScheduledBatch = []
        several: list[Request] = []  # with several pending tokens, or a pending source
        for request in self.running:
            pending = request.pending
            if pending > 1 or request.pending_source:
                several.append(request)
            elif pending == 1 and not request.full:
                decode.append((request, 1))
        decode = isolate(decode)
        prefill = self.prefill_batch(several, max(self.chunk - len(decode), self.chunk // 4, 1))
        return [batch for batch in (decode, prefill) if batch]

    def add(self, request: Request) -> None:
        request.leader = self.find_leader(request)
        self.waiting.join(request)

    def expired(self) -> list[Request]:
        """The requests whose deadline has passed."""
        now = monotonic()
        requests = (*self.running, *self.waiting)
        return [request for request in requests if request.deadline is not None and request.deadline <= now]

    def reserve_space(self) -> None:
        """Reserve space for the next token of every running request; preempt the last in rank if there is none."""
        for request in list(self.running):
            while request.row is not None and not self.store.reserve(request.row, request.length):
                if not self.read_tokens():
                    self.preempt(self.running[-1])

    def admit(self) -> None:
        """Admit waiting requests in their order, while there are rows and space."""
        while self.free_rows and (request := self.next_request()) is not None:
            row = min(self.free_rows)  # low rows first: a batch of rows 0 … B-1 is a slice of the store
            namespace = self.namespace(request) if self.shares else None
            cached = self.store.admit(row, request.prefix, namespace, len(request.ids))
            if cached is None:
                return
            self.free_rows.remove(row)
            self.waiting.remove(request)
            request.reused = request.reused if request.preempted else cached
            request.row, request.cached, request.preempted = row, cached, False
            self.waiting.charge(request.tenant, request.pending)
            insort(self.running, request, key=rank)

    def next_request(self) -> Request | None:
        """The first waiting request, unless it has to wait for an adapter's slot; then the first without an adapter.

        Other adapters do not pass it: their requests could keep all adapter slots in use for ever.
        """
        request = self.waiting.first()
        if request is None or self.can_run(request, self.running):
            return request
        return self.waiting.first(lambda other: other.adapter is None)

    def find_leader(self, request: Request) -> Request | None:
        """The first request with the same prompt, if that is not computed yet. Its prefix can be shared then."""
        key = sharing_key(request)
        if not self.shares or key is None or not 0 < self.store.shared_block < len(request.ids):
            return None
        queued = (other for other in (*self.running, *self.waiting) if not other.new)
        alike = (request.ids, request.prompt_keys, request.tenant, request.priority)
        leader = next((r for r in queued if (r.ids, r.prompt_keys, r.tenant, r.priority) == alike), None)
        return leader if leader is not None and sharing_key(leader) == key else None

    def prefill_batch(self, requests: list[Request], budget: int) -> ScheduledBatch:
        """As many of these requests as fit into the budget with padding."""
        batch: ScheduledBatch = []
        longest = 0
        for request in requests:
            length = chunk_length(request, budget, self.border)
            longest = max(longest, length, request.pending_source)
            if batch and (len(batch) + 1) * longest > budget:
                break
            batch.append((request, length))
        return isolate(batch)

    def advance(self, batch: ScheduledBatch) -> list[Request]:
        """Record a forward of this batch that has succeeded. Returns the requests that get a new token."""
        ready = []
        block = self.store.shared_block
        for request, length in batch:
            request.cached += min(length, request.pending)  # the tokens of a draft may be rejected
            pending = request.pending
            if not pending:
                ready.append(request)
                self.waiting.charge(request.tenant, 1)
            # In decode when a block has become full: one or two tokens have been read since the step before.
            if block and (length > 1 or min(request.cached, len(request.tokens)) % block < 2):
                self.commit(request, copy_state=pending > 0)
        return ready

    def commit(self, request: Request, copy_state: bool = False) -> None:
        """Offer the tokens that the host has read to other requests."""
        assert request.row is not None
        self.store.commit(request.row, request.prefix, min(request.cached, len(request.tokens)), copy_state)

    def preempt(self, request: Request) -> None:
        """Free the request's row and put it back into the queue."""
        assert not request.unread, "the tokens of a preempted request are read before"
        self.free_row(request)
        request.cached, request.preempted = 0, True
        self.preemptions += 1
        self.waiting.push(request)

    def remove(self, request: Request) -> None:
        """Remove a running or waiting request, and free its row."""
        if request.row is None:
            self.waiting.remove(request)
        else:
            self.free_row(request)
        self.waiting.leave(request)

    def free_row(self, request: Request) -> None:
        assert request.row is not None
        self.running.remove(request)
        if request.error is not None:  # other requests must not inherit keys and values that may be wrong
            self.store.forget(request.row)
        self.store.release(request.row)
        self.free_rows.add(request.row)
        request.row = None


def rank(request: Request) -> tuple[int, int]:
    return request.priority, request.arrival


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
