"""Sinusoidal positions: fixed sinusoids with geometrically growing wavelengths, added to the embeddings.

P[t, 2i] = sin(t / base^(2i/D))      P[t, 2i+1] = cos(t / base^(2i/D))        Vaswani et al. 2017

In the "half" layout all sines come first, then all cosines (Marian). An odd width has one more sine than cosines.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from regard.layout import TokenLayout
from regard.parts.position.base import Position, PositionModule
from regard.spec import require

SinusoidLayout = Literal["interleaved", "half"]


@dataclass(frozen=True)
class Sinusoidal(Position):
    places = ("stack",)
    absolute = True

    base: float = 10000.0
    layout: SinusoidLayout = "interleaved"

    def check(self) -> None:
        require(self.base > 0, f"sinusoidal: base={self.base} must be positive")

    def build(self, width: int, heads: int, /) -> PositionModule:
        return SinusoidalModule(width, self)


class SinusoidalModule(PositionModule):
    def __init__(self, width: int, spec: Sinusoidal):
        super().__init__()
        self.width, self.spec = width, spec

    def embed(self, x: Tensor, layout: TokenLayout) -> Tensor:
        return x + sinusoidal_embeddings(layout.positions, self.width, self.spec).to(x.dtype)  # (B, L, D)


def sinusoidal_embeddings(positions: Tensor, width: int, spec: Sinusoidal) -> Tensor:
    """(…) -> (…, width), in float64 for accuracy at large positions."""
    exponents = torch.arange(0, width, 2, dtype=torch.float64, device=positions.device) / width
    angles = positions.unsqueeze(-1) / spec.base**exponents  # (…, ⌈D/2⌉)
    pairs = torch.stack([angles.sin(), angles.cos()], -1 if spec.layout == "interleaved" else -2)
    return pairs.flatten(-2)[..., :width]
