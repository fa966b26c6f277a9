"""ALiBi: nearer keys score higher, by a slope that differs from head to head; nothing is learned.

    score(i, j) = q_i·k_j / √E - m_h |i - j|,     m_h = 2^(-8h/H) for h = 1 … H        Press et al. 2021

The bias is added after the scaling and not scaled itself (Falcon's is: `scaled`). For a number of heads that is no
power of two, the paper's code takes the slopes of the next lower power, then every other slope of the next higher one.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.at import At
from regard.kernels.attention.bias import Bias, Slopes
from regard.parts.position.none import Position, PositionModule


@dataclass(frozen=True)
class Alibi(Position):
    places = ("attention",)

    scaled: bool = False

    def build(self, width: int, heads: int) -> PositionModule:
        return AlibiModule(heads, width**-0.5 if self.scaled else 1.0)


def slopes(heads: int, device: torch.device | None = None) -> Tensor:
    """(H,) in float64, whatever the model's dtype."""
    power = 2 ** math.floor(math.log2(heads))
    first = torch.arange(2, 2 * power + 1, 2, dtype=torch.float64, device=device)
    between = torch.arange(1, 2 * power, 2, dtype=torch.float64, device=device)
    return 2 ** (torch.cat([first, between[: heads - power]]) * (-4 / power))


class AlibiModule(PositionModule):
    def __init__(self, heads: int, scale: float):
        super().__init__()
        self.heads, self.scale = heads, scale

    def bias(self, at: At) -> Bias:
        return Slopes(slopes(self.heads, at.positions.device) * self.scale)
