"""ALiBi: a bias that falls linearly with the distance of the key, with a fixed slope per head.

    score(i, j) = q_i·k_j / √E - m_h |i - j|,     m_h = 2^(-8h/H) for h = 1 … H        Press et al. 2021

The bias is added after the scaling of the scores and is not scaled itself (with `scaled` it is, as in Falcon). The 8 is
`exponent`; a larger value makes all slopes flatter, for longer sequences (16 in MPT's StoryWriter). If the number of
heads is not a power of two, the slopes are those of the next lower power, followed by every other slope of the next
higher one, as in the paper's code.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.kernels.attention.bias import Slopes
from regard.layout import Bias, TokenLayout
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

    def build(self, head_dim: int, heads: int, /) -> PositionModule:
        return AlibiModule(heads, head_dim**-0.5 if self.scaled else 1.0, self.exponent)


def slopes(heads: int, device: torch.device | None = None, exponent: float = 8.0) -> Tensor:
    """(H,) in float64, for any dtype of the model."""
    power = 2 ** math.floor(math.log2(heads))
    first = torch.arange(2, 2 * power + 1, 2, dtype=torch.float64, device=device)
    between = torch.arange(1, 2 * power, 2, dtype=torch.float64, device=device)
    return 2 ** (torch.cat([first, between[: heads - power]]) * (-exponent / 2 / power))


class AlibiModule(PositionModule):
    def __init__(self, heads: int, scale: float, exponent: float):
        super().__init__()
        self.heads, self.scale, self.exponent = heads, scale, exponent

    def bias(self, layout: TokenLayout) -> Bias:
        return layout.derived(alibi_bias, self.heads, self.scale, self.exponent)


def alibi_bias(layout: TokenLayout, heads: int, scale: float, exponent: float) -> Bias:
    """One for all layers, so that its values are computed once too."""
    return Slopes(slopes(heads, layout.positions.device, exponent) * scale)
