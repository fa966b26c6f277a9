"""Attention biases: numbers added to the scores, computed from the positions of queries and keys.

Tiled backends call `tile` for some queries and keys; the other backends call `values` for all pairs.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.layout import Bias


@dataclass(frozen=True, eq=False)
class Slopes(Bias):
    """bias(h, i, j) = -slope_h · |i - j|"""

    slopes: Tensor  # (H,)

    @property
    def learned(self) -> bool:
        return self.slopes.requires_grad

    def tile(self, q_positions: Tensor, k_positions: Tensor, dtype: torch.dtype) -> Tensor:
        slopes = self.slopes.to(torch.promote_types(dtype, torch.float32))  # bf16 rounds distances above 256
        distance = (k_positions.unsqueeze(-2) - q_positions.unsqueeze(-1)).abs()  # (…, l, s)
        return (-slopes.view(-1, 1, 1) * distance.unsqueeze(-3)).to(dtype)  # (…, H, l, s)


@dataclass(frozen=True, eq=False)
class Buckets(Bias):
    """bias(h, i, j) = table[bucket(j - i), h]: one learned number per head and range of distances.

    Of n buckets the first n/2 hold one distance each, the others ranges that grow geometrically up to `max_distance`;
    the last one holds all greater distances. A bidirectional bias has half of the buckets for each direction; otherwise
    a later key counts as distance 0. Raffel et al. 2020 (T5).
    """

    table: Tensor  # (buckets, H)
    max_distance: int
    bidirectional: bool

    def tile(self, q_positions: Tensor, k_positions: Tensor, dtype: torch.dtype) -> Tensor:
        limit = self.max_distance
        offset = (k_positions.unsqueeze(-2) - q_positions.unsqueeze(-1)).clamp(-limit, limit)  # (…, l, s)
        return F.embedding(offset + limit, self.by_offset(dtype)).movedim(-1, -3)  # (…, H, l, s)

    def by_offset(self, dtype: torch.dtype) -> Tensor:
        """(2·max_distance + 1, H): the bias of each offset j - i from -max_distance to max_distance."""
        offsets = torch.arange(-self.max_distance, self.max_distance + 1, device=self.table.device)
        return self.table[self.bucket(offsets)].to(dtype)

    def bucket(self, offset: Tensor) -> Tensor:
        """The bucket of each offset j - i."""
        if not self.bidirectional:
            return self.distance_bucket((-offset).clamp_min(0), len(self.table))
        half = len(self.table) // 2
        return self.distance_bucket(offset.abs(), half) + half * (offset > 0)

    def distance_bucket(self, distance: Tensor, buckets: int) -> Tensor:
        max_exact = buckets // 2  # smaller distances have a bucket each
        fraction = (distance.clamp_min(max_exact).double() / max_exact).log() / math.log(self.max_distance / max_exact)
        # 1e-9: rounding must not move the first distance of a range into the previous bucket.
        far = max_exact + (fraction * (buckets - max_exact) + 1e-9).long()
        return torch.where(distance < max_exact, distance, far.clamp_max(buckets - 1))
