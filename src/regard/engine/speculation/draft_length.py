"""How many tokens to draft for a request, from the acceptance of its recent drafts.

    maximize over k    expected(α, k) / cost(k)      cost(0) = 1,   cost(k) = start + ⌈c (k + 1) / tile⌉ · per_tile

expected(α, k) is the number of tokens that a forward yields (planning/speed.py), cost(k) that of drafting and verifying
c candidates of k tokens, in plain decode steps. The costs are fixed numbers per kind of device: if they were measured
while decoding, a sampled request could get other tokens in a slower run. On a CPU the step from one token to two is the
expensive one: a product of a matrix with a vector becomes one of two matrices, which takes 2.6 times as long, for 2
tokens as for 8. So long drafts pay there, short ones do not, and where acceptance is low, decoding without drafts is
faster.
"""

from typing import NamedTuple

from regard.planning.speed import expected_tokens

RETRY = 8  # steps without a draft, after which one is tried again
MEMORY = 0.75  # weight of the earlier drafts in the next estimate
PRIOR = (2.7, 3.0)  # accepted and verified tokens that a new request is credited with


class DraftCosts(NamedTuple):
    """Of a forward with a draft, in decode steps."""

    start: float
    per_tile: float
    tile: int = 1  # tokens of a forward that cost as much as one


COSTS = {"cpu": DraftCosts(1.45, 1.1, 8), "cuda": DraftCosts(1.0, 0.03)}


class DraftLength:
    """The length of the next draft of one request."""

    def __init__(self, most: int, costs: DraftCosts):
        self.most, self.costs = most, costs
        self.accepted, self.verified = PRIOR
        self.skipped = 0  # steps since the last draft

    def next(self, chains: int = 1) -> int:
        """How many tokens to draft; 0: none, because drafts would cost more than they yield. chains: candidates."""
        gains = [self.gain(length, chains) for length in range(self.most + 1)]
        shortest = 1 if self.skipped >= RETRY else 0
        self.skipped += 1
        return max(range(shortest, self.most + 1), key=gains.__getitem__)

    def gain(self, length: int, chains: int = 1) -> float:
        """The expected speed-up of drafts of this length."""
        start, per_tile, tile = self.costs
        cost = start + -(-chains * (length + 1) // tile) * per_tile if length else 1
        return expected_tokens(self.accepted / self.verified, length) / cost

    def update(self, drafted: int, accepted: int) -> None:
        """After a verification; only the first rejected token was verified."""
        self.skipped = 0
        self.accepted = MEMORY * self.accepted + accepted
        self.verified = MEMORY * self.verified + accepted + (accepted < drafted)
