"""Rotary positions: queries and keys are turned by an angle that grows with their position.

    ⟨R(s) q, R(t) k⟩ depends on t - s alone,     R(t) turns pair i by t / base^(2i/E)        Su et al. 2021

Pairs are (x_i, x_{i+E/2}), the "half" layout of Llama's published checkpoints. Angles are computed in float64: in
float32 the error at position 131071 is already a hundredth of a radian.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.at import At
from regard.parts.position.none import Position, PositionModule
from regard.spec import require


@dataclass(frozen=True)
class Rope(Position):
    places = ("attention",)

    base: float = 10000.0

    def check(self) -> None:
        require(self.base > 0, f"rope: base={self.base} must be positive")

    def build(self, width: int, heads: int) -> PositionModule:
        require(width % 2 == 0, f"rope: head_dim={width} must be even, coordinates turn in pairs")
        return RopeModule(width, self)


class RopeModule(PositionModule):
    def __init__(self, head_dim: int, spec: Rope):
        super().__init__()
        self.head_dim, self.base = head_dim, spec.base
        self.key = f"{spec} {head_dim}"

    def rotate(self, q: Tensor, k: Tensor, at: At) -> tuple[Tensor, Tensor]:
        cos, sin = at.once(f"{self.key} {q.dtype}", lambda: self.waves(at.positions, q.dtype))
        return turn(q, cos, sin), turn(k, cos, sin)

    def waves(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=positions.device) / self.head_dim
        angles = positions[:, None, :, None] * self.base**-exponents  # (B, 1, L, E/2)
        angles = torch.cat([angles, angles], -1)  # (B, 1, L, E)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin
