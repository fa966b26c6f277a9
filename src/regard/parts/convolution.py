"""Short convolution: every channel mixes its last few values; the cheapest way for a token to know its neighbours.

    y_t = Σ_{i<k} w_i ⊙ x_{t-i}          over tokens of the same document

Attention must learn to look one token back before it can match patterns; a convolution of a few taps gives it that
from the first step. In front of state-space and linear mixers since H3 (Fu et al. 2023), in front of attention as
"canon layers" (Allen-Zhu 2025).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.at import At
from regard.parts.body import Body
from regard.parts.state import FRESH, Fixed, FixedState
from regard.spec import require


@dataclass(frozen=True)
class ShortConvolution(Body):
    mixes: ClassVar[bool] = True

    taps: int = 4

    def check(self) -> None:
        require(self.taps > 1, f"short_convolution: taps={self.taps} must be at least 2, a token and the one before")

    def build(self, width: int) -> nn.Module:
        return ShortConvolutionModule(width, self.taps)

    def memory(self, width: int) -> Fixed:
        return Fixed({"tail": (self.taps - 1, width)})

    def flops(self, width: int, tokens: int, seen: int) -> int:
        return 0  # no matrix product


class ShortConvolutionModule(nn.Module):
    def __init__(self, width: int, taps: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(taps, width).normal_())

    def forward(self, x: Tensor, at: At, state: FixedState = FRESH) -> Tensor:
        order = at.once("valid first", lambda: valid_first(at))
        x, positions = pick(x, order), pick(at.positions, order)
        segments = None if at.segments is None else pick(at.segments, order)
        behind = len(self.weight) - 1
        (past,) = state.read(at, tail=x.new_zeros(len(x), behind, x.shape[2]))  # (B, k - 1, D)
        line = torch.cat([past.to(x.dtype), x], 1)  # (B, k - 1 + L, D)
        y = torch.zeros_like(x)
        for i, weight in enumerate(self.weight):
            inside = positions >= i  # (B, L) the token i before stands in the same document
            if segments is not None:
                inside = inside & (segments == F.pad(segments, (i, 0))[:, : x.shape[1]])
            y = y + line[:, behind - i : line.shape[1] - i].where(inside.unsqueeze(-1), 0.0) * weight
        state.write(at, tail=self.latest(line, at.valid))
        return y if order is None else pick(y, order.argsort(1))  # each token back to its place

    def latest(self, line: Tensor, valid: Tensor | None) -> Tensor:
        """(B, k - 1, D): what the next tokens will have behind them."""
        behind = len(self.weight) - 1
        if valid is None:
            return line[:, line.shape[1] - behind :]
        ends = valid.sum(1, keepdim=True) + torch.arange(behind, device=line.device)  # (B, k - 1)
        return pick(line, ends)


def valid_first(at: At) -> Tensor | None:
    """(B, L) an order in which no invalid token stands between valid ones; None when all are valid."""
    return None if at.valid is None else (~at.valid).to(torch.uint8).argsort(dim=1, stable=True)


def pick(x: Tensor, order: Tensor | None) -> Tensor:
    """The tokens of each row in this order: x (B, L) or (B, L, D), order (B, M) or None for as they are."""
    if order is None:
        return x
    return x.gather(1, order if x.dim() == 2 else order.unsqueeze(-1).expand(-1, -1, x.shape[2]))
