"""Speculative decoding of an engine's requests: drafts for a decode batch, and their verification.

    tokens t₁ … tₙ, draft d₁ … d_k       one forward of tₙ d₁ … d_k gives the logits after each of them
    position i                           sample the next token as without a draft; continue while it equals dᵢ

So a forward yields from 1 to k + 1 tokens. Each is sampled by the same code, from the same logits, settings and random
number as in plain decoding. For drafts that are not random the tokens are therefore those of plain decoding, with any
settings. Where the drafter draws from a distribution q, dᵢ is accepted with min(1, p/q), otherwise the token is drawn
from (p - q)₊: other tokens, with the distribution of plain decoding. Leviathan et al. 2023, Chen et al. 2023.

After a rejection the row of the store returns to its last accepted token. A recurrent state cannot: it returns to the
state before the forward, and the accepted tokens are computed again with the next one.

A drafter may propose several candidates for a greedy request. The same forward computes each of the others in a free
row, forked from that of the request. The candidate that agrees with the most likely tokens for longest becomes the
draft, and its row is forked back: whichever is chosen, the tokens are those of plain decoding.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from time import perf_counter
from typing import Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from regard.engine.request import Draft, Request, Token
from regard.engine.runner import Runner
from regard.engine.sampling import sample
from regard.engine.scheduler import ScheduledBatch, Scheduler
from regard.engine.speculation.draft_length import COSTS, DraftLength
from regard.engine.speculation.statistics import SpeculationStatistics
from regard.engine.stores.base import SLACK, Snapshot
from regard.models.decoder import DecoderModule

AddToken = Callable[[Request, Token | str], None]  # appends a token to a request, or ends it for this reason
MAX_DRAFT = SLACK - 1  # tokens that every ring buffer can rewind


class Drafter(Protocol):
    """Proposes the next tokens of requests. Wrong proposals cost time only."""

    def open(self, target: DecoderModule, rows: int, capacity: int) -> None:
        """Called once, by the engine. ValueError if the drafter does not fit the model."""
        ...

    def propose(self, requests: Sequence[Request], lengths: Sequence[int]) -> Sequence[Draft]:
        """The draft of each request: at most so many tokens, perhaps none."""
        ...


@runtime_checkable
class LogitsReader(Protocol):
    """A drafter that drafts from the logits of earlier verifications."""

    def observe(self, request: Request, inputs: Sequence[int], accepted: int, logits: Tensor) -> None:
        """After a verification. inputs: the last token and its draft; logits: (len(inputs), V) after each of them."""
        ...


@runtime_checkable
class StreamReader(Protocol):
    """A drafter that drafts from the model's own states. Decode steps without a draft then run eagerly too."""

    def read_stream(self, batch: ScheduledBatch, stream: Tensor) -> None:
        """After a forward: the residual stream (B, L, D) after the last block, of `length` tokens per request.

        The first token has the position `request.cached`. Those of a rejected draft are computed again, at the same
        positions. Tokens whose prefix was reused are not in any batch.
        """
        ...


@runtime_checkable
class TreeDrafter(Protocol):
    """A drafter that proposes several candidates for a greedy request (Draft.others)."""

    chains: int  # candidates per request

    def adopt(self, request: Request, other: Request) -> None:
        """Continue a request with what the last forward has computed for another candidate of it."""
        ...


class Speculation:
    def __init__(self, drafter: Drafter, draft_tokens: int, scheduler: Scheduler, runner: Runner):
        """draft_tokens: the most per request and forward. The number follows the acceptance of recent drafts."""
        if type(draft_tokens) is not int or not 1 <= draft_tokens <= MAX_DRAFT:
            raise ValueError(f"draft_tokens={draft_tokens!r} must be an integer from 1 to {MAX_DRAFT}")
        self.drafter, self.draft_tokens, self.scheduler = drafter, draft_tokens, scheduler
        self.runner, self.store = runner, runner.store
        self.lengths: WeakKeyDictionary[Request, DraftLength] = WeakKeyDictionary()
        self.costs = COSTS.get(runner.device.type, COSTS["cpu"])
        self.snapshots: dict[Request, Snapshot] = {}
        self.branches: dict[Request, list[Request]] = {}  # copies of a request: its other candidates
        self.branch_rows: list[int] = []  # free rows of the store, which they use
        self.chosen: dict[Request, Request] = {}  # the branch of a request whose draft is verified
        self.chains = drafter.chains if isinstance(drafter, TreeDrafter) else 1
        if type(self.chains) is not int or self.chains < 1:
            raise ValueError(f"chains={self.chains!r} must be a positive integer; 1 for one candidate")
        self.statistics = SpeculationStatistics(draft_tokens)
        drafter.open(runner.model, self.store.rows, self.store.max_tokens)
        if isinstance(drafter, StreamReader):
            runner.read_stream = drafter.read_stream
            if runner.graphs is not None or runner.compiled is not None:
                warnings.warn(
                    "compile has no effect with a drafter that reads hidden states: steps run eagerly", stacklevel=4
                )
                runner.graphs = runner.compiled = None

    def handles(self, batch: ScheduledBatch) -> bool:
        """Whether this is a decode batch: not of prompts, but perhaps with accepted tokens that are computed again.

        While forwards are observed there are no drafts: hooks would be called with tokens that are rejected.
        """
        if self.runner.observers:
            return False
        return all(length == r.pending and (length == 1 or r.new) and not r.pending_source for r, length in batch)

    def step(self, batch: ScheduledBatch, forward: Callable[[ScheduledBatch], Tensor], add: AddToken) -> None:
        """Draft, run one forward, and add the new tokens of all requests of the batch."""
        try:
            start = perf_counter()
            batch = self.add_drafts(batch)
            drafted = perf_counter()
            logits = self.forward(batch, forward)
            tokens = self.verify(self.scheduler.advance(batch), logits, add)
            plain = all(length == 1 for _, length in batch)
            self.statistics.count_step(plain, tokens, drafted - start, perf_counter() - drafted)
        finally:
            for request, _ in batch:
                request.draft = None
            for row in self.branch_rows:
                self.store.release(row)
            self.branch_rows.clear()
            self.branches.clear()
            self.chosen.clear()
            self.snapshots.clear()

    def add_drafts(self, batch: ScheduledBatch) -> ScheduledBatch:
        """The batch with drafts for its requests."""
        chains = min(self.chains, 1 + len(self.scheduler.free_rows) // len(batch))
        lengths = {request: self.draft_length(request, chains) for request, _ in batch}
        drafted = [request for request, length in lengths.items() if length > 0]
        for request, draft in zip(drafted, self.propose(drafted, lengths), strict=True):
            assert request.row is not None and len(draft.ids) <= lengths[request]
            if draft.ids and self.store.reserve(request.row, request.length + len(draft.ids)):
                request.draft = draft
                if self.store.needs_snapshots:
                    self.snapshots[request] = self.store.snapshot(request.row)
                self.add_branches(request, draft.others[: chains - 1])
        self.store.upload()
        return [(request, length + (len(request.draft.ids) if request.draft else 0)) for request, length in batch]

    def add_branches(self, request: Request, others: Sequence[list[int]]) -> None:
        """A copy of the request for each of these candidates, in a row that continues the same prefix."""
        if not others:
            return
        assert request.row is not None
        snapshot = self.snapshots.get(request) or self.store.snapshot(request.row)
        for ids in others:
            row = min(self.scheduler.free_rows.difference(self.branch_rows))
            self.branch_rows.append(row)
            forked = self.store.fork(request.row, row, snapshot)
            if not (forked and self.store.reserve(row, request.length + len(ids))):
                return
            branch = copy(request)
            branch.row, branch.draft = row, Draft(ids)
            self.branches.setdefault(request, []).append(branch)

    def forward(self, batch: ScheduledBatch, run: Callable[[ScheduledBatch], Tensor]) -> Tensor:
        """Run a batch with its branches. Returns the logits of the best candidate of each request: its draft."""
        if not self.branches:
            return run(batch)
        branches = [branch for group in self.branches.values() for branch in group]
        forwarded = [*batch, *((branch, 1 + len(branch.draft.ids)) for branch in branches if branch.draft)]
        logits = run(forwarded)  # it sorts its batch by row
        sizes = {request: 1 + (len(request.draft.ids) if request.draft else 0) for request, _ in forwarded}
        rows = dict(zip(sizes, logits.split(list(sizes.values())), strict=True))
        likeliest = dict(zip(sizes, logits.argmax(-1).split(list(sizes.values())), strict=True))
        for request, group in self.branches.items():
            best = max((request, *group), key=lambda candidate: agreement(candidate, likeliest[candidate].tolist()))
            if best is not request:
                self.chosen[request], request.draft, rows[request] = best, best.draft, rows[best]
        return torch.cat([rows[request] for request, _ in batch])

    def adopt(self, request: Request, branch: Request) -> None:
        """Continue a request with the row of one of its branches."""
        assert request.row is not None and branch.row is not None
        snapshot = self.store.snapshot(branch.row)
        self.store.release(request.row)
        forked = self.store.fork(branch.row, request.row, snapshot)
        assert forked, "the row has released the space that it needs"
        assert isinstance(self.drafter, TreeDrafter)
        self.drafter.adopt(request, branch)

    def propose(self, requests: Sequence[Request], lengths: Mapping[Request, int]) -> Sequence[Draft]:
        try:
            return self.drafter.propose(requests, [lengths[request] for request in requests]) if requests else []
        except RuntimeError as error:  # such as too little memory
            reason = str(error).partition("\n")[0]
            warnings.warn(f"the drafter failed ({reason}); decoding without drafts in this step", stacklevel=4)
            return [Draft([]) for _ in requests]

    def draft_length(self, request: Request, chains: int) -> int:
        """How many tokens are drafted: none for the last token, after a failure, and if accepted tokens are pending."""
        if request.pending != 1 or request.isolated:
            return 0
        if request not in self.lengths:
            self.lengths[request] = DraftLength(self.draft_tokens, self.costs)
        chains = chains if request.sampling.temperature == 0 else 1
        return min(self.lengths[request].next(chains), request.limit - len(request.new) - 1)

    def verify(self, requests: Sequence[Request], logits: Tensor, add: AddToken) -> int:
        """Sample the next tokens of requests, as many as their drafts allow. Returns how many.

        logits: (N, V), for each request one row, and one more per token of its draft.
        """
        drafts = {request: list(request.draft.ids) if request.draft else [] for request in requests}
        rows = dict(zip(requests, logits.split([1 + len(ids) for ids in drafts.values()]), strict=True))
        last = {request: request.tokens[-1] for request in requests}
        if any(r.sampling.reads_tokens or (r.draft and r.draft.probabilities is not None) for r in requests):
            accepted, count = self.verify_in_turn(requests, rows, add)
        else:
            accepted, count = self.verify_at_once(requests, logits, drafts, add)
        for request, draft in drafts.items():
            if draft:
                self.finish_round(request, len(draft), accepted[request])
                if isinstance(self.drafter, LogitsReader):
                    self.drafter.observe(request, [last[request], *draft], accepted[request], rows[request])
        return count

    def verify_at_once(
        self, requests: Sequence[Request], logits: Tensor, drafts: Mapping[Request, Sequence[int]], add: AddToken
    ) -> tuple[dict[Request, int], int]:
        """How many tokens of each draft are accepted, and the number of new tokens. No token depends on earlier ones.

        So the host waits for the device once.
        """
        places = [(request, i) for request in requests for i in range(1 + len(drafts[request]))]
        sampled = iter(sample(logits, [request for request, _ in places], ahead=[i for _, i in places]).read())
        accepted, count = dict.fromkeys(requests, 0), 0
        for request, draft in drafts.items():
            tokens = [next(sampled) for _ in range(1 + len(draft))]
            count += 1
            while self.accepts(request, tokens[accepted[request]], add):
                accepted[request] += 1
                count += 1
        return accepted, count

    def verify_in_turn(
        self, requests: Sequence[Request], rows: Mapping[Request, Tensor], add: AddToken
    ) -> tuple[dict[Request, int], int]:
        """The same where a token may depend on the tokens before it."""
        accepted, active, count = dict.fromkeys(requests, 0), list(requests), 0
        while active:
            sampled = sample(torch.stack([rows[request][accepted[request]] for request in active]), active)
            tokens, count = zip(active, sampled.read(), strict=True), count + len(active)
            active = [request for request, token in tokens if self.accepts(request, token, add)]
            for request in active:
                accepted[request] += 1
        return accepted, count

    def accepts(self, request: Request, token: Token | str, add: AddToken) -> bool:
        """Add the next token of a request, or its error; True if the token is that of the draft."""
        add(request, token)
        draft = request.draft
        if request.finish is not None or draft is None or not draft.ids or request.tokens[-1] != draft.ids[0]:
            return False
        draft.pop()
        if request not in self.chosen:  # until finish_round, the row of a request with another draft lacks its tokens
            request.cached += 1
        self.scheduler.waiting.charge(request.tenant, 1)
        return True

    def finish_round(self, request: Request, drafted: int, accepted: int) -> None:
        """Keep the row of the candidate that was verified, without its rejected tokens."""
        self.statistics.count_draft(drafted, accepted)
        self.lengths[request].update(drafted, accepted)
        if request.row is None:  # it has ended
            return
        if accepted < drafted and self.store.needs_snapshots:
            snapshot = self.snapshots[request]
            self.store.rewind(request.row, snapshot.length, snapshot)
            request.cached = snapshot.length
            return
        if request in self.chosen:
            self.adopt(request, self.chosen[request])
            request.cached += accepted
        if accepted < drafted:
            self.store.rewind(request.row, request.cached)


def agreement(candidate: Request, likeliest: Sequence[int]) -> int:
    """How many tokens of the draft of a candidate are the most likely ones, before the first that is not."""
    ids = candidate.draft.ids if candidate.draft else []
    return next((i for i, (id, best) in enumerate(zip(ids, likeliest, strict=False)) if id != best), len(ids))


def open_speculation(
    drafter: Drafter | None, draft_tokens: int, scheduler: Scheduler, runner: Runner
) -> Speculation | None:
    """The speculation of an engine; None without a drafter. ValueError for settings that exclude it."""
    if drafter is None:
        return None
    if runner.batch_invariant:
        raise ValueError("batch_invariant does not support speculation; leave one of them out")
    return Speculation(drafter, draft_tokens, scheduler, runner)
