"""The position-wise feed-forward layer: what is done to each token alone.

FeedForward(x) = W_down σ(W_up x)                      Vaswani et al. 2017; σ = ReLU, or GELU in GPT-2
SwiGLU(x)      = W_down (SiLU(W_gate x) ⊙ W_up x)      Shazeer 2020
"""

from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from regard.parts.body import Body
from regard.spec import require

ACTIVATIONS = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


@dataclass(frozen=True)
class FeedForward(Body):
    hidden: int
    activation: Literal["relu", "gelu", "gelu_tanh", "silu"] = "gelu"
    bias: bool = True

    def check(self) -> None:
        require(self.hidden > 0, f"feedforward: hidden={self.hidden} must be positive")

    def build(self, width: int) -> nn.Module:
        return FeedForwardModule(width, self)

    def flops(self, width: int, tokens: int, seen: int) -> int:
        return tokens * 4 * width * self.hidden


class FeedForwardModule(nn.Module):
    def __init__(self, width: int, spec: FeedForward):
        super().__init__()
        self.up_proj = nn.Linear(width, spec.hidden, bias=spec.bias)
        self.down_proj = nn.Linear(spec.hidden, width, bias=spec.bias)
        self.activation = ACTIVATIONS[spec.activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.up_proj(x)))


@dataclass(frozen=True)
class SwiGLU(Body):
    hidden: int
    bias: bool = False

    def check(self) -> None:
        require(self.hidden > 0, f"swiglu: hidden={self.hidden} must be positive")

    def build(self, width: int) -> nn.Module:
        return SwiGLUModule(width, self)

    def flops(self, width: int, tokens: int, seen: int) -> int:
        return tokens * 6 * width * self.hidden


class SwiGLUModule(nn.Module):
    def __init__(self, width: int, spec: SwiGLU):
        super().__init__()
        self.gate_proj = nn.Linear(width, spec.hidden, bias=spec.bias)
        self.up_proj = nn.Linear(width, spec.hidden, bias=spec.bias)
        self.down_proj = nn.Linear(spec.hidden, width, bias=spec.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
