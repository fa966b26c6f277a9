"""Rotary positions for images: half of the pairs are rotated by the row of a patch, half by its column.

    token t -> (row, column) = divmod(t - prefix, columns)
    pair i < E/4: angle row · θ_i       pair E/4 + i: angle column · θ_i       θ_i = base^(-4i/E)       Qwen2-VL, 2024

A score depends on the distance of two patches in both directions. Tokens before the patches, such as [CLS], are not
rotated. Pairs are (x_i, x_{i+E/2}).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.layout import TokenLayout
from regard.parts.position.base import Position, PositionModule, rope_frequencies
from regard.parts.position.rope import rotate_pairs
from regard.spec import require


@dataclass(frozen=True)
class Rope2D(Position):
    places = ("attention",)

    columns: int
    prefix: int = 0
    base: float = 10000.0

    def check(self) -> None:
        require(self.columns > 0, f"rope2d: columns={self.columns} must be positive")
        require(self.prefix >= 0, f"rope2d: prefix={self.prefix} must not be negative")
        require(self.base > 0, f"rope2d: base={self.base} must be positive")

    def build(self, head_dim: int, heads: int, /) -> PositionModule:
        require(
            head_dim % 4 == 0,
            f"rope2d: head_dim={head_dim} must be divisible by 4, because half of the pairs rotate by row",
        )
        return Rope2DModule(head_dim, self)


class Rope2DModule(PositionModule):
    def __init__(self, head_dim: int, spec: Rope2D):
        super().__init__()
        self.spec, self.head_dim = spec, head_dim

    def rotate(self, q: Tensor, k: Tensor, layout: TokenLayout) -> tuple[Tensor, Tensor]:
        cos, sin = layout.derived(rotations_2d, self.spec, self.head_dim, q.dtype)
        return rotate_pairs(q, cos, sin, "half"), rotate_pairs(k, cos, sin, "half")


def rotations_2d(layout: TokenLayout, spec: Rope2D, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotation angles (B, 1, L, E/2)."""
    patch = (layout.positions - spec.prefix).clamp_min(0)  # prefix tokens get angle 0: no rotation
    rows_columns = torch.stack([patch // spec.columns, patch % spec.columns], -1)  # (B, L, 2)
    angles = rows_columns.unsqueeze(-1) * rope_frequencies(spec.base, head_dim // 2, layout)  # (B, L, 2, E/4)
    angles = angles.flatten(-2).unsqueeze(1)  # (B, 1, L, E/2)
    return angles.cos().to(dtype), angles.sin().to(dtype)
