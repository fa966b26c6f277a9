"""Online softmax: attention over a subset of the keys, and the merge of two such partial results.

    partial       m = max_j s_j      l = Σ_j exp(s_j - m)      o = Σ_j exp(s_j - m) v_j
    merged        m = max(m₁, m₂)    l = l₁ e^(m₁-m) + l₂ e^(m₂-m)    o likewise
    all keys      out = o / l        log Σ_j exp(s_j) = m + log l

The merge is associative and commutative, so keys may be processed in any subsets and order, and no full row of scores
is needed: tiles (tiled.py), ring attention and split decoding are exact. Milakov & Gimelshein 2018; Dao et al. 2022.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, eq=False)
class PartialSoftmax:
    m: Tensor  # (…, L, 1)
    l: Tensor  # (…, L, 1)  # noqa: E741 (the papers' letter)
    o: Tensor  # (…, L, Ev)

    def merge(self, other: "PartialSoftmax") -> "PartialSoftmax":
        m = torch.maximum(self.m, other.m)
        factor, other_factor = (self.m - m).exp(), (other.m - m).exp()
        return PartialSoftmax(m, self.l * factor + other.l * other_factor, self.o * factor + other.o * other_factor)

    def queries(self, rows: slice) -> "PartialSoftmax":
        """Only these queries."""
        return PartialSoftmax(self.m[..., rows, :], self.l[..., rows, :], self.o[..., rows, :])

    def out(self) -> Tensor:
        """(…, L, Ev); zeros for a query without any allowed key."""
        return self.o / self.l.where(self.l > 0, 1.0)

    def log_sum(self) -> Tensor:
        """(…, L, 1): log Σ exp(s); 0 for a query without any allowed key."""
        return torch.where(self.l > 0, self.m + self.l.log(), 0.0)


def empty_partial(q: Tensor, width: int, sinks: Tensor | None = None) -> PartialSoftmax:
    """The result over no keys, for queries (B, H, L, E): neutral, or with only the sink of each head (H,)."""
    lowest = q.new_full((*q.shape[:-1], 1), torch.finfo(q.dtype).min / 2)
    m = lowest if sinks is None else sinks.to(q.dtype).view(1, -1, 1, 1).expand_as(lowest)
    l = torch.zeros_like(m) if sinks is None else torch.ones_like(m)  # noqa: E741
    return PartialSoftmax(m, l, q.new_zeros(*q.shape[:-1], width))


def partial_softmax(s: Tensor, v: Tensor) -> PartialSoftmax:
    """The result over keys with these scores (…, L, S) and values (…, S, Ev).

    Masked scores are the lowest number of the dtype; their weight is 0 even in a row in which all scores are masked.
    """
    m = s.amax(-1, keepdim=True).clamp_min(torch.finfo(s.dtype).min / 2)
    p = exponential(s - m)
    return PartialSoftmax(m, p.sum(-1, keepdim=True), p @ v)


def exponential(x: Tensor) -> Tensor:
    """exp(x) in place, and exactly 0 where exp(x) would be subnormal.

    On some processors exp is fifty times slower for arguments that underflow, and masks produce many of them.
    """
    low = math.log(torch.finfo(x.dtype).tiny) + 2
    return F.threshold(x.clamp_min_(low).exp_(), 2 * math.exp(low), 0.0, inplace=True)
