"""ALiBi: nearer keys score higher, by a slope that differs from head to head; nothing is learned.

    score(i, j) = q_i·k_j - m_h |i - j|,     m_h = 2^(-8h/H) for h = 1 … H        Press et al. 2021

For a number of heads that is no power of two, the paper's code takes the slopes of the next lower power, then every
other slope of the next higher one.
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
    def build(self, width: int, heads: int) -> PositionModule:
        return AlibiModule(heads)


def slopes(heads: int) -> list[float]:
    power = 2 ** math.floor(math.log2(heads))
    first = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    between = [2 ** (-4 * h / power) for h in range(1, 2 * power, 2)]
    return first + between[: heads - power]


class AlibiModule(PositionModule):
    slopes: Tensor

    def __init__(self, heads: int):
        super().__init__()
        # No checkpoint holds them, so they are made on a real device even where a model is built on the meta device.
        self.register_buffer("slopes", torch.tensor(slopes(heads), device="cpu"), persistent=False)

    def bias(self, at: At) -> Bias:
        return Slopes(self.slopes)
