"""Tokens of drafts from a drafter's logits: the most likely one, or for a request that is sampled one drawn from q.

q is the softmax of the drafter's logits with the temperature and the filters of the request. The random numbers are
those of a stream of their own, so the draft is a function of the seed and the tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from regard.engine.request import Draft, Request
from regard.engine.sampling import DRAW_DRAFT, apply_filters, draw, random_numbers
from regard.engine.speculation.candidate_chains import likeliest, other_chains


class DrawnToken(NamedTuple):
    id: int
    q: Tensor | None  # (V,) the distribution that the token was drawn from; None: it is the most likely one


def draw_drafts(logits: Tensor, requests: Sequence[Request], i: int) -> list[DrawnToken | None]:
    """Token i of the draft of each request, from logits (B, V); None where they are not finite."""
    ids: list[int] = logits.argmax(-1).tolist()
    tokens: list[DrawnToken | None] = [DrawnToken(id, None) for id in ids]
    sampled = [b for b, request in enumerate(requests) if request.sampling.temperature > 0]
    if sampled:
        targets = [requests[b] for b in sampled]
        filtered = apply_filters(logits[sampled].double(), [target.sampling for target in targets])
        q = filtered.softmax(-1)
        drawn = draw(filtered, random_numbers(targets, DRAW_DRAFT, [i] * len(targets))).tolist()
        for b, id, row in zip(sampled, drawn, q, strict=True):
            tokens[b] = None if bool(row.isnan().any()) else DrawnToken(id, row)
    return tokens


def as_draft(tokens: Sequence[DrawnToken]) -> Draft:
    rows = [token.q for token in tokens if token.q is not None]
    return Draft([token.id for token in tokens], torch.stack(rows) if rows else None)


def draft_chain(logits: Tensor, requests: Sequence[Request], lengths: Sequence[int], chains: int = 1) -> list[Draft]:
    """Drafts of B requests from the logits (K, B, V) of K heads; head k predicts token k of the draft.

    The next token was sampled from the model's own logits, and the heads do not know one another's tokens.
    chains: candidates per greedy request, the draft among them.
    """
    logits = logits[: max(lengths, default=0)]
    tokens = [draw_drafts(head, requests, i) for i, head in enumerate(logits)]
    candidates = [likeliest(head, chains) for head in logits] if chains > 1 else []
    drafts = []
    for b, length in enumerate(lengths):
        chosen = []
        for head in tokens[:length]:
            token = head[b]
            if token is None:  # its logits are not finite
                break
            chosen.append(token)
        draft = as_draft(chosen)
        if requests[b].sampling.temperature == 0:
            draft.others = other_chains([head[b] for head in candidates[:length]], chains - 1, independent=True)
        drafts.append(draft)
    return drafts
