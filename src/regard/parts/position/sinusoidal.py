"""Sinusoidal positions: fixed waves of geometrically growing length, added to the embeddings.

P[t, 2i] = sin(t / base^(2i/D))      P[t, 2i+1] = cos(t / base^(2i/D))        Vaswani et al. 2017
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.at import At
from regard.parts.position.none import Position, PositionModule
from regard.spec import require


@dataclass(frozen=True)
class Sinusoidal(Position):
    places = ("decoder",)

    base: float = 10000.0

    def check(self) -> None:
        require(self.base > 0, f"sinusoidal: base={self.base} must be positive")

    def build(self, width: int, heads: int) -> PositionModule:
        require(width % 2 == 0, f"sinusoidal: width={width} must be even, a sine and a cosine for each wave")
        return SinusoidalModule(width, self.base)


class SinusoidalModule(PositionModule):
    def __init__(self, width: int, base: float):
        super().__init__()
        self.width, self.base = width, base

    def embed(self, x: Tensor, at: At) -> Tensor:
        exponents = torch.arange(0, self.width, 2, dtype=torch.float64, device=x.device) / self.width
        angles = at.positions.unsqueeze(-1) / self.base**exponents  # (B, L, D/2) float64: far positions stay exact
        return x + torch.stack([angles.sin(), angles.cos()], -1).flatten(-2).to(x.dtype)  # (B, L, D)
