"""ALiBi: nearer keys score higher, by a slope that differs from head to head; nothing is learned.

    score(i, j) = q_i·k_j / √E - m_h |i - j|,     m_h = 2^(-8h/H) for h = 1 … H        Press et al. 2021

The bias is added after the scaling and not scaled itself (Falcon's is: `scaled`). The 8 is the `exponent`: with a
larger one slopes are flatter, for longer texts (16 in MPT's StoryWriter). For a number of heads that is no
power of two, the paper's code takes the slopes of the next lower power, then every other slope of the next higher one.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.kernels.attention.bias import Bias, Slopes
from regard.layout import TokenLayout
from regard.parts.position.base import Position, PositionModule
from regard.spec import require


@dataclass(frozen=True)
class Alibi(Position):
    places = ("attention",)
    replaces_bias = True

    scaled: bool = False
    exponent: float = 8.0

    def check(self) -> None:
        require(self.exponent > 0, f"alibi: exponent={self.exponent} must be positive")

    def build(self, width: int, heads: int) -> PositionModule:
        return AlibiModule(heads, width**-0.5 if self.scaled else 1.0, self.exponent)


def slopes(heads: int, device: torch.device | None = None, exponent: float = 8.0) -> Tensor:
    """(H,) in float64, whatever the model's dtype."""
    power = 2 ** math.floor(math.log2(heads))
    first = torch.arange(2, 2 * power + 1, 2, dtype=torch.float64, device=device)
    between = torch.arange(1, 2 * power, 2, dtype=torch.float64, device=device)
    return 2 ** (torch.cat([first, between[: heads - power]]) * (-exponent / 2 / power))


class AlibiModule(PositionModule):
    def __init__(self, heads: int, scale: float, exponent: float):
        super().__init__()
        self.heads, self.scale, self.exponent = heads, scale, exponent

    def bias(self, layout: TokenLayout) -> Bias:
        return Slopes(slopes(self.heads, layout.positions.device, self.exponent) * self.scale)
