"""Biases are data: what is added to the scores is computed from positions, where it is needed and for what is needed.

A backend that works in tiles reads the data (slopes); the others ask for `values`.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from regard.at import At


class Bias(Protocol):
    def values(self, at: At, dtype: torch.dtype) -> Tensor:
        """(B, H, L, S) to be added to the scores of these queries and keys; computed in at least float32."""
        ...


@dataclass(frozen=True, eq=False)
class Slopes:
    """bias(h, i, j) = -slope_h · |i - j|"""

    slopes: Tensor  # (H,)

    def values(self, at: At, dtype: torch.dtype) -> Tensor:
        slopes = self.slopes.to(torch.promote_types(dtype, torch.float32))  # bf16 counts to 256: further keys would tie
        distance = (at.positions.unsqueeze(-1) - at.key_positions.unsqueeze(-2)).abs()  # (B, L, S)
        return (-slopes.view(-1, 1, 1) * distance.unsqueeze(1)).to(dtype)  # (B, H, L, S)
