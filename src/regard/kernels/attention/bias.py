"""Biases are data: what is added to the scores is computed from positions, where it is needed and for what is needed.

A backend that works in tiles asks for the `tile` of some queries and some keys; the others ask for all `values`.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.layout import TokenLayout


class Bias:
    tiles: ClassVar[bool] = True  # do positions alone decide? Otherwise only `values` are to be had

    def tile(self, q_positions: Tensor, k_positions: Tensor, dtype: torch.dtype) -> Tensor:
        """Positions (…, l) and (…, s) -> (…, H, l, s) to be added to their scores; computed in at least float32."""
        raise NotImplementedError

    def values(self, layout: TokenLayout, dtype: torch.dtype) -> Tensor:
        """(B, H, L, S) for all queries and keys, or (B, 1, L, S) where heads do not differ."""
        return self.tile(layout.positions, layout.key_positions, dtype)


@dataclass(frozen=True, eq=False)
class Slopes(Bias):
    """bias(h, i, j) = -slope_h · |i - j|"""

    slopes: Tensor  # (H,)

    def tile(self, q_positions: Tensor, k_positions: Tensor, dtype: torch.dtype) -> Tensor:
        slopes = self.slopes.to(torch.promote_types(dtype, torch.float32))  # bf16 counts to 256: further keys would tie
        distance = (k_positions.unsqueeze(-2) - q_positions.unsqueeze(-1)).abs()  # (…, l, s)
        return (-slopes.view(-1, 1, 1) * distance.unsqueeze(-3)).to(dtype)  # (…, H, l, s)


@dataclass(frozen=True, eq=False)
class Buckets(Bias):
    """bias(h, i, j) = table[bucket(j - i), h]: one learned number a head for every range of distances.

    Of n buckets the first n/2 hold one distance each, the others ranges that grow geometrically up to `reach`; the last
    takes all that is further. In both directions, each has half of the buckets; else a later key counts as distance 0.
    """

    table: Tensor  # (buckets, H)
    reach: int
    bidirectional: bool

    def tile(self, q_positions: Tensor, k_positions: Tensor, dtype: torch.dtype) -> Tensor:
        ahead = (k_positions.unsqueeze(-2) - q_positions.unsqueeze(-1)).clamp(-self.reach, self.reach)  # (…, l, s)
        return F.embedding(ahead + self.reach, self.line(dtype)).movedim(-1, -3)  # (…, H, l, s)

    def line(self, dtype: torch.dtype) -> Tensor:
        """(2·reach + 1, H): the bias of every distance that differs, from the furthest behind to the furthest ahead."""
        steps = torch.arange(-self.reach, self.reach + 1, device=self.table.device)
        return self.table[self.bucket(steps)].to(dtype)

    def bucket(self, ahead: Tensor) -> Tensor:
        """The bucket of a key that stands this many places ahead of the query (behind it: negative)."""
        if not self.bidirectional:
            return self.one_way((-ahead).clamp_min(0), len(self.table))
        half = len(self.table) // 2
        return self.one_way(ahead.abs(), half) + half * (ahead > 0)

    def one_way(self, distance: Tensor, buckets: int) -> Tensor:
        exact = buckets // 2
        share = (distance.clamp_min(exact).double() / exact).log() / math.log(self.reach / exact)  # 0 … 1 at the reach
        # The hair keeps a distance that begins a range from falling into the one before by rounding.
        far = exact + (share * (buckets - exact) + 1e-9).long()
        return torch.where(distance < exact, distance, far.clamp_max(buckets - 1))
