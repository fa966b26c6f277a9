"""Contrastive search: of the k most likely tokens, the one whose hidden state is least similar to the earlier ones.

    argmax over the k most likely v of   (1 - α) p(v) - α max_j cos(h_v, h_j)

h_v is the last hidden state after v is appended, h_j are those of the earlier tokens. Su et al. 2022. The k candidates
of a step are forks of one row of the store and are computed in one forward; the row of the best one is continued.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.engine.logits_processors import process
from regard.engine.request import GenerationError, Request, Token
from regard.engine.runner import eager_span
from regard.engine.sampling import log_softmax, penalize_rows
from regard.engine.scheduler import Scheduler
from regard.engine.search_rows import SearchRows, check_search
from regard.engine.searches import SearchSteps
from regard.layout import TokenLayout


@dataclass(frozen=True)
class ContrastiveOptions:
    candidates: int = 4  # k
    alpha: float = 0.6  # weight of the penalty for similarity; 0 is greedy decoding

    def __post_init__(self) -> None:
        if not isinstance(self.candidates, int) or self.candidates < 1:
            raise ValueError(f"candidates={self.candidates!r} must be a positive integer")
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha={self.alpha!r} must be from 0 to 1")


class ContrastiveSearch:
    """Runs one search in rows of a store. model: returns the decoder for the next forward, with its adapter."""

    def __init__(self, scheduler: Scheduler, model: Callable[[], Any], device: torch.device, capacity: int):
        self.rows, self.chunk, self.store = SearchRows(scheduler), scheduler.chunk, scheduler.store
        self.model, self.device, self.capacity = model, device, capacity

    def start(self, request: Request, settings: ContrastiveOptions) -> SearchSteps:
        """The search for the new tokens. request: not submitted."""
        check_search(request.sampling)
        self.rows.check("candidates", settings.candidates)
        return self.run(request, settings)

    def run(self, request: Request, settings: ContrastiveOptions) -> SearchSteps:
        with self.rows.take(settings.candidates):
            yield from self.search(request, settings)
        return request.new

    def search(self, request: Request, settings: ContrastiveOptions) -> SearchSteps:
        row = self.rows.admit(request.tokens)
        chunks: list[Tensor] = []
        for start in range(0, len(request.tokens), self.chunk):
            chunks += self.hidden([request.tokens[start : start + self.chunk]], [row], start)
            yield
        hidden = torch.cat(chunks)  # (T, D)
        context, last = F.normalize(hidden, dim=-1), hidden[-1:]
        while request.finish is None:
            logits = self.model().logits(last)  # (1, V)
            probabilities, ids = self.most_likely(logits, request, settings.candidates)
            snapshot = self.store.snapshot(row)
            rows = [row, *(self.rows.fork(snapshot) for _ in ids[1:])]
            for each in rows:
                self.rows.reserve(each, len(request.tokens) + 1)
            hidden = self.hidden([[id] for id in ids], rows, len(request.tokens))[:, 0]  # (k, D)
            unit = F.normalize(hidden, dim=-1)
            similarity = (unit @ context.T).amax(-1)  # (k,)
            best = int(((1 - settings.alpha) * probabilities - settings.alpha * similarity).argmax())
            for i, each in enumerate(rows):
                if i != best:
                    self.rows.release(each)
            row, last, context = rows[best], hidden[best : best + 1], torch.cat([context, unit[best : best + 1]])
            self.append(request, ids[best], float(log_softmax(logits)[0, ids[best]]))
            yield

    def most_likely(self, logits: Tensor, request: Request, count: int) -> tuple[Tensor, list[int]]:
        """(k,) probabilities of the most likely tokens after penalties and bans, and their ids"""
        if not bool(log_softmax(logits).isfinite().any()):
            raise GenerationError("the model's logits for this search are not finite")
        processed, errors = process(penalize_rows(logits, [request]), [request])
        for error in errors.values():
            raise GenerationError(error)
        if request.forced_id is not None:
            return processed.new_ones(1), [request.forced_id]
        best = log_softmax(processed)[0].exp().topk(min(count, processed.shape[-1]))
        return best.values, best.indices.tolist()

    def hidden(self, tokens: list[list[int]], rows: list[int], start: int) -> Tensor:
        """(B, L, D) hidden states of tokens that continue these rows at position `start`"""
        ids = torch.tensor(tokens, device=self.device)
        positions = torch.arange(start, start + ids.shape[1], device=self.device).expand_as(ids)
        layout = TokenLayout(positions, rows=torch.tensor(rows, device=self.device))
        span = eager_span(start + ids.shape[1], self.store)
        self.store.upload()
        return self.model().hidden(ids, layout, self.store.begin_forward(layout, span, check=False))

    def append(self, request: Request, id: int, logprob: float) -> None:
        full = len(request.tokens) + 1 >= self.capacity or len(request.new) + 1 >= request.sampling.max_new
        finish = "stop" if request.stops(id) else "length" if full else None
        request.add(Token(id, logprob, (), finish))
