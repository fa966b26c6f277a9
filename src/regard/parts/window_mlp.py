"""The mixer of the first neural language model: the last n tokens, concatenated, through one hidden layer.

    out_t = W_2 tanh(W_1 [x_t ; x_{t-1} ; … ; x_{t-n+1}] + b_1) + b_2

Each offset in the window has its own columns of W_1, so nothing learned at one offset applies at another, and tokens
before the window have no influence. Inputs before the start of a document are zero. Bengio et al. 2003.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.kernels.convolution import gather_tokens, next_tail, order_valid_first
from regard.layout import TokenLayout
from regard.parts.body import Body
from regard.parts.state import STATELESS, FixedSize, FixedState
from regard.parts.tap import Tap
from regard.spec import require


@dataclass(frozen=True)
class WindowMLP(Body):
    mixes: ClassVar[bool] = True

    size: int = 5  # n, the newest token included
    hidden: int | None = None  # None: the width

    def check(self) -> None:
        require(self.size > 0, f"fixed_window: size={self.size} must be positive")
        require(self.hidden is None or self.hidden > 0, f"fixed_window: hidden={self.hidden} must be positive")

    def build(self, width: int) -> nn.Module:
        return WindowMLPModule(width, self)

    def memory(self, width: int) -> FixedSize:
        return FixedSize({"tail": (self.size - 1, width)})

    def flops(self, width: int, tokens: int, keys: int) -> int:
        return 2 * tokens * (self.size + 1) * width * (self.hidden or width)


class WindowMLPModule(nn.Module):
    no_attention_map = "the hidden layer is no linear function of the tokens in the window; record its `neurons`"

    def __init__(self, width: int, spec: WindowMLP):
        super().__init__()
        self.size = spec.size
        hidden = spec.hidden or width
        self.up_proj = nn.Linear(spec.size * width, hidden)
        self.down_proj = nn.Linear(hidden, width)
        self.neurons = Tap()

    def forward(self, x: Tensor, layout: TokenLayout, state: FixedState = STATELESS) -> Tensor:
        order = layout.derived(order_valid_first)
        segments = None if layout.segments is None else gather_tokens(layout.segments, order)
        earlier, length = self.size - 1, x.shape[1]
        (tail,) = state.read(layout, tail=x.new_zeros(len(x), earlier, x.shape[2]))
        inputs = torch.cat([tail.to(x.dtype), gather_tokens(x, order)], 1)  # (B, n - 1 + L, D)
        shifted = [inputs[:, earlier - i : earlier - i + length] for i in range(self.size)]  # each (B, L, D)
        if segments is not None:
            same_document = [segments == F.pad(segments, (i, 0))[:, :length] for i in range(self.size)]
            shifted = [x.where(same.unsqueeze(-1), 0.0) for x, same in zip(shifted, same_document, strict=True)]
        state.write(layout, tail=next_tail(inputs, earlier, layout.valid))
        y = self.down_proj(self.neurons(torch.tanh(self.up_proj(torch.cat(shifted, -1)))))  # (B, L, D)
        return y if order is None else gather_tokens(y, order.argsort(1))  # in the order of the input
