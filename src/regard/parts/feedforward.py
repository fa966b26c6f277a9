"""The position-wise feed-forward layer.

    FeedForward(x) = W_down σ(W_up x)                      Vaswani et al. 2017; σ = ReLU, or GELU in GPT-2
    Gated(x)       = W_down (σ(W_gate x) ⊙ W_up x)         Shazeer 2020

Gated units by their σ: sigmoid GLU (Dauphin et al. 2017), relu ReGLU, gelu GEGLU, silu SwiGLU, identity Bilinear.
"relu2" is ReLU squared (So et al. 2021), "quick_gelu" x · sigmoid(1.702 x) (CLIP). A gated unit has three matrices, so
a hidden width of 8/3 D gives it the 8 D² weights of two matrices at 4 D. GPT-OSS clamps both factors before σ and adds
1 to W_up x.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.kernels.gelu import gelu, gelu_tanh
from regard.layout import TokenLayout
from regard.parts.body import Body
from regard.parts.state import STATELESS, State
from regard.parts.tap import Tap
from regard.spec import require

Activation = Literal["relu", "relu2", "gelu", "gelu_tanh", "quick_gelu", "silu", "sigmoid", "tanh", "identity"]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "identity": lambda x: x,
}
LinearFactory = Callable[..., nn.Module]  # makes a projection: (columns, rows, bias) -> module


@dataclass(frozen=True)
class PositionWise(Body):
    """Base of bodies that transform each token independently."""

    hidden: int | None = None  # None: computed from the width
    activation: Activation = "gelu"
    bias: bool = True
    dropout: float = 0.0  # on the hidden channels, in training

    def check(self) -> None:
        require(self.hidden is None or self.hidden > 0, f"{self.kind}: hidden={self.hidden} must be positive")
        require(0 <= self.dropout < 1, f"{self.kind}: dropout={self.dropout} must be in [0, 1)")

    def hidden_dim(self, width: int) -> int:
        """Hidden channels in a stack of this width."""
        raise NotImplementedError

    def canonical(self, width: int) -> Self:
        return replace(self, hidden=self.hidden_dim(width)) if width else self

    def build(self, width: int, linear: LinearFactory = nn.Linear) -> nn.Module:
        """`linear` makes the projections; experts pass one that holds a matrix per expert."""
        raise NotImplementedError


@dataclass(frozen=True)
class FeedForward(PositionWise):
    def hidden_dim(self, width: int) -> int:
        return self.hidden or 4 * width

    def build(self, width: int, linear: LinearFactory = nn.Linear) -> nn.Module:
        return FeedForwardModule(width, self, linear)

    def flops(self, width: int, tokens: int, keys: int) -> int:
        return tokens * 4 * width * self.hidden_dim(width)


@dataclass(frozen=True)
class Gated(PositionWise):
    activation: Activation = "silu"
    bias: bool = False
    multiple_of: int = 256  # of the hidden width, if it is computed
    limit: float | None = None  # W_gate x is at most this, W_up x within ± this
    offset: float = 0.0  # added to W_up x

    def check(self) -> None:
        super().check()
        require(self.multiple_of > 0, f"{self.kind}: multiple_of={self.multiple_of} must be positive")
        require(self.limit is None or self.limit > 0, f"{self.kind}: limit={self.limit} must be positive")

    def hidden_dim(self, width: int) -> int:
        return self.hidden or eight_thirds(width, self.multiple_of)

    def build(self, width: int, linear: LinearFactory = nn.Linear) -> nn.Module:
        return GatedModule(width, self, linear)

    def flops(self, width: int, tokens: int, keys: int) -> int:
        return tokens * 6 * width * self.hidden_dim(width)


@dataclass(frozen=True)
class SwiGLU(Gated):
    """The gated unit of Llama; its activation is fixed."""

    activation: Literal["silu"] = "silu"


def eight_thirds(width: int, multiple_of: int = 256) -> int:
    """8/3 of the width, rounded up to a multiple: 4096 -> 10922.7 -> 11008 (Llama 7B).

    Other ratios are common: Llama 3 8B and Mistral 7B have 14336 = 3.5 · 4096.
    """
    return -(-8 * width // (3 * multiple_of)) * multiple_of


class FeedForwardModule(nn.Module):
    def __init__(self, width: int, spec: FeedForward, linear: LinearFactory):
        super().__init__()
        hidden = spec.hidden_dim(width)
        self.up_proj = linear(width, hidden, bias=spec.bias)
        self.down_proj = linear(hidden, width, bias=spec.bias)
        self.activation, self.dropout = ACTIVATIONS[spec.activation], spec.dropout
        self.neurons = Tap()

    def forward(
        self, x: Tensor, layout: TokenLayout | None = None, state: State = STATELESS, ends: tuple[Tensor, ...] = ()
    ) -> Tensor:
        """x (…, D) -> (…, D). Only experts pass `ends`, the end of each expert's rows in x, for grouped projections."""
        h = self.neurons(self.activation(self.up_proj(x, *ends)))  # (…, F)
        return self.down_proj(F.dropout(h, self.dropout, self.training), *ends)  # (…, D)


class GatedModule(nn.Module):
    def __init__(self, width: int, spec: Gated, linear: LinearFactory):
        super().__init__()
        hidden = spec.hidden_dim(width)
        self.gate_proj = linear(width, hidden, bias=spec.bias)
        self.up_proj = linear(width, hidden, bias=spec.bias)
        self.down_proj = linear(hidden, width, bias=spec.bias)
        self.activation, self.dropout = ACTIVATIONS[spec.activation], spec.dropout
        self.neurons = Tap()
        self.limit, self.offset = spec.limit, spec.offset

    def forward(
        self, x: Tensor, layout: TokenLayout | None = None, state: State = STATELESS, ends: tuple[Tensor, ...] = ()
    ) -> Tensor:
        gate, up = self.gate_proj(x, *ends), self.up_proj(x, *ends)  # (…, F)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        h = self.neurons(self.activation(gate) * (up + self.offset if self.offset else up))
        return self.down_proj(F.dropout(h, self.dropout, self.training), *ends)  # (…, D)
