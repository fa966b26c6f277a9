"""Beam search: keep the sequences with the highest sum of log-probabilities, several at a time.

    score of a running sequence = Σ log p(token)          of a finished one = Σ log p(token) / length^length_penalty

Every step extends all running sequences by all tokens and keeps the best `width`. Sequences that end with a stop id
leave the beam and compete by their final score. Equal to `transformers.generate(num_beams=width)`. With several groups,
a group avoids tokens that earlier groups have chosen in the same step: diverse beam search, Vijayakumar et al. 2016.

A beam is a row of the store. A sequence with two continuations is forked into the row of one that has none.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from regard.engine.logits_processors import process
from regard.engine.request import GenerationError, Request, Token, TokenHistory
from regard.engine.sampling import log_softmax, penalize_rows
from regard.engine.scheduler import ScheduledBatch, Scheduler
from regard.engine.search_rows import SearchRows, check_search
from regard.engine.searches import SearchSteps


@dataclass(frozen=True)
class Beams:
    width: int = 4  # sequences that are kept, in all groups together
    groups: int = 1
    diversity_penalty: float = 0.0  # subtracted per earlier group that chose the token in this step
    length_penalty: float = 1.0  # above 0 prefers longer sequences
    # True: stop at `width` finished sequences; False: once none of this length could be better; "never": of any length
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        if not isinstance(self.width, int) or self.width < 1:
            raise ValueError(f"width={self.width!r} must be a positive integer")
        if not isinstance(self.groups, int) or self.groups < 1 or self.width % self.groups:
            raise ValueError(f"groups={self.groups!r} must divide width={self.width}")
        if not 0 <= self.diversity_penalty < float("inf"):
            raise ValueError(f"diversity_penalty={self.diversity_penalty!r} must be at least 0 and finite")
        if (self.groups > 1) != (self.diversity_penalty > 0):
            raise ValueError(f"groups={self.groups} and diversity_penalty={self.diversity_penalty} need each other")
        if not -100 <= self.length_penalty <= 100:
            raise ValueError(f"length_penalty={self.length_penalty!r} must be from -100 to 100")
        if self.early_stopping not in (True, False, "never"):
            raise ValueError(f"early_stopping={self.early_stopping!r} must be True, False or 'never'")


class Beam(NamedTuple):
    ids: tuple[int, ...]  # the new tokens
    score: float


class Continuation(NamedTuple):
    parent: int  # index of the running sequence
    id: int
    score: float


class BeamGroup:
    """The running and finished sequences of one group."""

    def __init__(self, beams: Beams, max_new: int, first: Request):
        self.beams, self.width, self.max_new = beams, beams.width // beams.groups, max_new
        self.running = [first]
        self.scores = [0.0]
        self.finished: list[Beam] = []
        self.done = False

    def advance(self, logprobs: Tensor, stops: int) -> list[Continuation]:
        """The best unfinished continuations, at most `width`. logprobs: (n, V) of the running sequences."""
        totals = logprobs + logprobs.new_tensor(self.scores).unsqueeze(-1)  # (n, V)
        count = min(max(2, 1 + stops) * self.width, totals.numel())  # enough, although some of them stop
        best = totals.flatten().topk(count)
        vocab, length = logprobs.shape[-1], len(self.running[0].new) + 1
        running: list[Continuation] = []
        closed = self.beams.early_stopping is True and len(self.finished) == self.width
        for rank, (score, index) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True)):
            parent, id = divmod(index, vocab)
            sequence = self.running[parent]
            if score == -torch.inf:  # a banned token
                continue
            if sequence.stops(id) or length == self.max_new:
                if rank < self.width and not closed:
                    self.finish(
                        Beam((*sequence.tokens[len(sequence.ids) :], id), score / length**self.beams.length_penalty)
                    )
            elif len(running) < self.width:
                running.append(Continuation(parent, id, score))
        self.done = not running or not self.can_improve(running[0].score, length)
        return running

    def finish(self, beam: Beam) -> None:
        self.finished = sorted([*self.finished, beam], key=lambda beam: -beam.score)[: self.width]

    def can_improve(self, best: float, length: int) -> bool:
        """Whether a running sequence, of which `best` is the highest score, may become better than a finished one."""
        if len(self.finished) < self.width:
            return True
        longest = self.beams.early_stopping == "never" and self.beams.length_penalty > 0
        possible = best / (self.max_new if longest else length) ** self.beams.length_penalty
        return self.beams.early_stopping is not True and possible > self.finished[-1].score


class BeamSearch:
    """Runs one search in rows of a store."""

    def __init__(self, scheduler: Scheduler, forward: Callable[[ScheduledBatch], Tensor], vocab: int, capacity: int):
        self.rows, self.chunk, self.forward = SearchRows(scheduler), scheduler.chunk, forward
        self.vocab, self.capacity = vocab, capacity

    def start(self, first: Request, beams: Beams) -> SearchSteps:
        """The search for the finished sequences, best first. first: a request that is not submitted."""
        check_search(first.sampling)
        self.rows.check("width", beams.width)
        return self.run(first, beams)

    def run(self, first: Request, beams: Beams) -> SearchSteps:
        with self.rows.take(beams.width):
            return (yield from self.search(first, beams))

    def search(self, first: Request, beams: Beams) -> SearchSteps:
        max_new = min(first.sampling.max_new, self.capacity - len(first.ids))
        groups = [BeamGroup(beams, max_new, first) for _ in range(beams.groups)]
        logprobs = yield from self.prefill(first)  # by row
        while not all(group.done for group in groups):
            chosen: Counter[int] = Counter()  # by earlier groups in this step
            continuations = []
            for group in groups:
                if group.done:
                    continue
                rows = torch.stack([logprobs[request.row] for request in group.running])  # (n, V)
                for id, count in chosen.items():
                    rows[:, id] -= count * beams.diversity_penalty
                kept = group.advance(rows, len(first.sampling.stop_ids))
                chosen.update(continuation.id for continuation in kept)
                continuations.append((group, [] if group.done else kept))
            self.branch(continuations)
            running = [request for group in groups if not group.done for request in group.running]
            if running:
                logprobs = self.decode(running)
                yield
        return sorted((beam for group in groups for beam in group.finished), key=lambda beam: -beam.score)

    def prefill(self, request: Request) -> SearchSteps:
        request.row = self.rows.admit(request.tokens)
        while request.pending > self.chunk:
            self.compute([(request, self.chunk)])
            yield
        logprobs = self.compute([(request, request.pending)])
        yield
        return logprobs

    def decode(self, requests: Sequence[Request]) -> dict[int | None, Tensor]:
        for request in requests:
            assert request.row is not None
            self.rows.reserve(request.row, len(request.tokens))
        return self.compute([(request, 1) for request in requests])

    def compute(self, batch: ScheduledBatch) -> dict[int | None, Tensor]:
        """Run a forward; (V,) log-probabilities by row, of the requests without pending tokens."""
        self.rows.store.upload()
        logits = self.forward(batch)  # in the order of the batch, which the forward sorts
        for request, length in batch:
            request.cached += length
        ready = [request for request, _ in batch if request.pending == 0]
        if not ready:
            return {}
        logprobs = log_softmax(logits)
        if not bool((logprobs.amax(-1) <= 0).all()):  # also False for NaN
            raise GenerationError("the model's logits for this beam search are not finite")
        logprobs, errors = process(penalize_rows(logprobs, ready), ready)
        for error in errors.values():
            raise GenerationError(error)
        for row, request in zip(logprobs, ready, strict=True):
            if request.forced_id is not None:
                row.fill_(-torch.inf)[request.forced_id] = 0.0
        return {request.row: row for request, row in zip(ready, logprobs, strict=True)}

    def branch(self, continuations: list[tuple[BeamGroup, list[Continuation]]]) -> None:
        """Replace the running sequences of the groups by their continuations, and assign rows to these."""
        parents = {group.running[c.parent] for group, kept in continuations for c in kept}
        dropped = {request for group, _ in continuations for request in group.running} - parents
        for request in sorted(dropped, key=lambda request: request.row or 0):
            assert request.row is not None
            self.rows.release(request.row)
        taken: set[Request] = set()
        for group, kept in continuations:
            running = [self.child(group.running[c.parent], c.id, taken) for c in kept]
            group.running, group.scores = running, [c.score for c in kept]

    def child(self, parent: Request, id: int, taken: set[Request]) -> Request:
        """The parent's sequence with one more token; the first child takes the parent's row, others a copy.

        taken: the parents whose row a child has.
        """
        child = Request(
            parent.ids, parent.sampling, parent.source, parent.embeddings, salt=parent.salt, adapter=parent.adapter,
            new=list(parent.new),
        )  # fmt: skip
        child.tokens, child.cached, child.row = list(parent.tokens), parent.cached, parent.row
        if parent.history is not None:
            child.history = TokenHistory(parent.ids, self.vocab, parent.history.prompt.device)
            child.history.counts = parent.history.counts.clone()
        child.add(Token(id, 0.0, (), None))
        if parent in taken:
            assert parent.row is not None
            child.row = self.rows.fork(self.rows.store.snapshot(parent.row))
        taken.add(parent)
        return child
