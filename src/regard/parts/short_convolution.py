"""Short convolution: every channel is a weighted sum of its last few values, the cheapest mixer of neighbouring tokens.

    y_t = Σ_{i<k} w_i ⊙ x_{t-i}          over tokens of the same document

Attention has to learn to attend to the previous token; a convolution with a few taps can copy it from the start. It
precedes state-space and linear mixers since H3 (Fu et al. 2023), and attention as "canon layers" (Allen-Zhu 2025).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from regard.kernels.convolution import convolve
from regard.layout import TokenLayout
from regard.parts.body import Body
from regard.parts.state import STATELESS, FixedSize, FixedState
from regard.spec import require


@dataclass(frozen=True)
class ShortConvolution(Body):
    mixes: ClassVar[bool] = True

    taps: int = 4

    def check(self) -> None:
        require(self.taps > 1, f"short_convolution: taps={self.taps} must be at least 2: a token and the previous one")

    def build(self, width: int) -> nn.Module:
        return ShortConvolutionModule(width, self.taps)

    def memory(self, width: int) -> FixedSize:
        return FixedSize({"tail": (self.taps - 1, width)})

    def flops(self, width: int, tokens: int, keys: int) -> int:
        return 0  # no matrix product


class ShortConvolutionModule(nn.Module):
    no_attention_map = "its weights are the same for all tokens: the parameter `weight` has them"
    weight_decay = no_muon = ("weight",)

    def __init__(self, width: int, taps: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(taps, width).normal_())

    def forward(self, x: Tensor, layout: TokenLayout, state: FixedState = STATELESS) -> Tensor:
        (tail,) = state.read(layout, tail=x.new_zeros(len(x), len(self.weight) - 1, x.shape[2]))  # (B, k - 1, D)
        y, tail = convolve(x, self.weight, None, tail, layout)
        state.write(layout, tail=tail)
        return y
