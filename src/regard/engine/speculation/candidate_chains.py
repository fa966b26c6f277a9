"""Candidates beside the most likely draft of a greedy request: chains that leave it at one token.

    draft          d_1 … d_k, the most likely tokens
    other chain    d_1 … d_{i-1}, a likely token a other than d_i, then d_{i+1} … d_k where these do not depend on a
    its gain       p(d_1) … p(d_{i-1}) · p(a) · (1 + p(d_{i+1}) + p(d_{i+1}) p(d_{i+2}) + …)

The gain is the expected number of tokens that the chain adds to those of the draft. No two chains share a token after
the one at which they leave the draft, so the best chains are those with the largest gains. Each is verified in a row of
its own, which shares the cache of the request: a tree of candidates (Cai et al. 2024) without a mask of its own.
"""

from collections.abc import Sequence
from heapq import nlargest
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from torch import Tensor


class Candidates(NamedTuple):
    """The most likely tokens of one position, in descending order."""

    ids: list[int]
    probabilities: list[float]


def likeliest(logits: Tensor, count: int) -> list[Candidates]:
    """Of each row of logits (N, V)."""
    top = logits.softmax(-1).topk(min(count, logits.shape[-1]))
    return [Candidates(*row) for row in zip(top.indices.tolist(), top.values.tolist(), strict=True)]


def other_chains(positions: Sequence[Candidates], count: int, independent: bool) -> list[list[int]]:
    """The best chains beside the draft, at most `count`, the best first.

    independent: the tokens of a position do not depend on earlier ones of the draft. Otherwise a chain ends with the
    token at which it leaves the draft: what would follow is not known.
    """
    draft = [candidates.ids[0] for candidates in positions]
    best = [candidates.probabilities[0] for candidates in positions]
    reached = accumulate(best, mul, initial=1.0)  # the probability that the draft is right up to this position
    chains: list[tuple[float, list[int]]] = []
    for i, (start, candidates) in enumerate(zip(reached, positions, strict=False)):
        rest = draft[i + 1 :] if independent else []
        expected = start * sum(accumulate(best[i + 1 : i + 1 + len(rest)], mul, initial=1.0))
        chains += [
            (p * expected, [*draft[:i], id, *rest])
            for id, p in zip(candidates.ids[1:], candidates.probabilities[1:], strict=True)
        ]
    return [chain for _, chain in nlargest(count, chains, key=lambda chain: chain[0])]
