"""Online softmax: attention over some of the keys, and the law that joins two such parts into one.

    of some keys      m = max_j s_j      l = Σ_j exp(s_j - m)      o = Σ_j exp(s_j - m) v_j
    joined            m = max(m₁, m₂)    l = l₁ e^(m₁-m) + l₂ e^(m₂-m)    and o alike
    of all keys       out = o / l        log Σ_j exp(s_j) = m + log l

Joining is associative and commutative, so keys may come in any parts and any order and no row of scores need ever be
whole: this makes tiles (tiled.py), rings of machines and split decoding exact. Milakov & Gimelshein 2018; Dao et al.
2022.
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

    def join(self, other: "PartialSoftmax") -> "PartialSoftmax":
        m = torch.maximum(self.m, other.m)
        mine, theirs = (self.m - m).exp(), (other.m - m).exp()
        return PartialSoftmax(m, self.l * mine + other.l * theirs, self.o * mine + other.o * theirs)

    def of(self, rows: slice) -> "PartialSoftmax":
        """Of some queries."""
        return PartialSoftmax(self.m[..., rows, :], self.l[..., rows, :], self.o[..., rows, :])

    def out(self) -> Tensor:
        """(…, L, Ev); zeros for a query that saw no key."""
        return self.o / self.l.where(self.l > 0, 1.0)

    def log_sum(self) -> Tensor:
        """(…, L, 1): log Σ exp(s); 0 for a query that saw no key."""
        return torch.where(self.l > 0, self.m + self.l.log(), 0.0)


def nothing(like: Tensor, width: int, sinks: Tensor | None = None) -> PartialSoftmax:
    """The part before any key, for queries like these (B, H, L, E): neutral, or where a head's sink is all there is."""
    lowest = like.new_full((*like.shape[:-1], 1), torch.finfo(like.dtype).min / 2)
    m = lowest if sinks is None else sinks.to(like.dtype).view(1, -1, 1, 1).expand_as(lowest)
    full = torch.zeros_like(m) if sinks is None else torch.ones_like(m)
    return PartialSoftmax(m, full, like.new_zeros(*like.shape[:-1], width))


def part_of(s: Tensor, v: Tensor) -> PartialSoftmax:
    """The part of keys with these scores (…, L, S) and values (…, S, Ev).

    Scores of keys that are not seen are the dtype's lowest number, whose exponential is 0 also where no key is seen.
    """
    m = s.amax(-1, keepdim=True).clamp_min(torch.finfo(s.dtype).min / 2)
    p = exponential(s - m)
    return PartialSoftmax(m, p.sum(-1, keepdim=True), p @ v)


def exponential(x: Tensor) -> Tensor:
    """exp(x), and exactly 0 where that is smaller than the dtype's small numbers; x is used up.

    Some processors' exp takes fifty times as long for what underflows, and a mask makes many of those.
    """
    low = math.log(torch.finfo(x.dtype).tiny) + 2
    return F.threshold(x.clamp_min_(low).exp_(), 2 * math.exp(low), 0.0, inplace=True)
