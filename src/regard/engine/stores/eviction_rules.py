"""Rules that choose, per kv head, which keys a cache keeps: those that queries have attended to most.

    m_j = Σ_i w_ij        attention received by key j, summed over queries i and the query heads of the kv head

HeavyHitters (H2O, Zhang et al. 2023, arXiv:2306.14048): all queries count. Whenever `every` more tokens have been
computed, the cache is reduced to budget - every tokens: the newest half of them, and of the others those with the
largest m. So it never holds more than `budget` tokens.

PromptWindow (SnapKV, Li et al. 2024, arXiv:2404.14469): the last `window` queries of the prompt count. After the prompt
the cache is reduced to `budget` tokens: these `window` ones, and of the others those with the largest mean of m over
`pool` neighbours, because a key is of little use without its neighbours. Later tokens are all kept.

Queries are divided into blocks by their positions, and tokens are evicted after the last query of a block only. Queries
of a block attend to all of its tokens up to their own. So the result does not depend on the chunks of a forward.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

OBSERVED = 32  # queries at the end of a prompt
POOL = 5  # neighbours whose mean decides
EVERY = 16  # tokens between evictions


class EvictionRule(Protocol):
    """Positions (B, n); prompts (B, 1): the number of tokens of each row's prompt."""

    @property
    def slots(self) -> int | None:
        """The most tokens that are kept of a sequence; None: it depends on the sequence."""
        ...

    def kept(self, length: int, prompt: int) -> int:
        """Tokens that are kept of a sequence of this length."""
        ...

    def max_blocks(self, queries: int) -> int:
        """The most blocks to which this many consecutive queries belong."""
        ...

    def blocks(self, positions: Tensor, prompts: Tensor) -> Tensor:
        """(B, n) the number of the block of each query; consecutive blocks have consecutive numbers."""
        ...

    def counts(self, positions: Tensor, prompts: Tensor) -> Tensor:
        """(B, n) whether the weights of a query are added to m."""
        ...

    def ends_block(self, positions: Tensor, prompts: Tensor) -> Tensor:
        """(B, n) whether tokens are evicted after a query."""
        ...

    def keep(self, positions: Tensor, received: Tensor, last: Tensor) -> Tensor:
        """(B, K, S) the keys that are kept after the query at `last` (B, 1, 1).

        positions: (B, K, S), negative for a slot that is empty; received: (B, K, S), m.
        """
        ...


@dataclass(frozen=True)
class HeavyHitters:
    budget: int

    @property
    def every(self) -> int:
        """Tokens between two evictions."""
        return max(1, min(EVERY, self.budget // 4))

    @property
    def slots(self) -> int:
        return self.budget

    def kept(self, length: int, prompt: int) -> int:
        since = length % self.every
        return min(length - since, self.budget - self.every) + since

    def max_blocks(self, queries: int) -> int:
        return (queries + self.every - 2) // self.every + 1

    def blocks(self, positions: Tensor, prompts: Tensor) -> Tensor:
        return positions // self.every

    def counts(self, positions: Tensor, prompts: Tensor) -> Tensor:
        return torch.ones_like(positions, dtype=torch.bool)

    def ends_block(self, positions: Tensor, prompts: Tensor) -> Tensor:
        return positions % self.every == self.every - 1

    def keep(self, positions: Tensor, received: Tensor, last: Tensor) -> Tensor:
        kept = self.budget - self.every
        return top(positions, received, newest=positions > last - (kept + 1) // 2, count=kept)


@dataclass(frozen=True)
class PromptWindow:
    budget: int
    window: int = OBSERVED
    pool: int = POOL
    slots = None

    def kept(self, length: int, prompt: int) -> int:
        return length if length < prompt else min(prompt, self.budget) + length - prompt

    def max_blocks(self, queries: int) -> int:
        return min(queries, 2)

    def blocks(self, positions: Tensor, prompts: Tensor) -> Tensor:
        return (positions >= prompts).long()

    def counts(self, positions: Tensor, prompts: Tensor) -> Tensor:
        return (positions < prompts) & (positions >= prompts - self.window)

    def ends_block(self, positions: Tensor, prompts: Tensor) -> Tensor:
        return positions == prompts - 1

    def keep(self, positions: Tensor, received: Tensor, last: Tensor) -> Tensor:
        order = positions.where(positions >= 0, torch.iinfo(positions.dtype).max).argsort(-1)  # empty slots at the end
        inside = (positions >= 0).to(received.dtype)
        sums, counts = (
            F.avg_pool1d(x.gather(-1, order), self.pool, 1, self.pool // 2) for x in (received * inside, inside)
        )
        pooled = torch.empty_like(received).scatter(-1, order, sums / counts.clamp_min(1e-9))
        return top(positions, pooled, newest=positions > last - self.window, count=self.budget)


def top(positions: Tensor, scores: Tensor, newest: Tensor, count: int) -> Tensor:
    """(B, K, S) True for `count` keys per head: the newest, and those of the others with the largest scores."""
    held = positions >= 0
    ranked = scores.masked_fill(newest, torch.inf).masked_fill(~held, -torch.inf)
    best = ranked.topk(min(count, ranked.shape[-1]), -1).indices
    return torch.zeros_like(held).scatter(-1, best, True) & held
