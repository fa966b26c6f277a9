"""RG-LRU, the real-gated linear recurrent unit: a diagonal recurrence whose decay depends on the token.

    u = conv(W_x x)        r = σ(W_r u + b_r)        i = σ(W_i u + b_i)        a = exp(-8 r ⊙ softplus(Λ))
    h_t = a_t ⊙ h_{t-1} + √(1 - a_t²) ⊙ i_t ⊙ u_t          out = W_o (h ⊙ gelu(W_g x))

The factor √(1 - a²) keeps the variance of the state equal to that of its inputs for any decay. The first token of a
document has no previous state and is written with factor 1. W_r and W_i are block-diagonal, one block per head.
De et al. 2024 (Griffin, which alternates it with local attention).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.kernels.convolution import convolve
from regard.kernels.recurrent.implied_map import mean_over_channels
from regard.kernels.recurrent.linear_recurrence import linear_recurrence
from regard.layout import TokenLayout
from regard.parts.body import Body
from regard.parts.feedforward import ACTIVATIONS, Activation
from regard.parts.split_heads import divisors
from regard.parts.ssm.selective import ConvWeights, chunked_forward, filled, uniform
from regard.parts.state import STATELESS, FixedSize, FixedState
from regard.parts.tap import MapKind, Tap
from regard.spec import SpecError, require

DECAY_EXPONENT = 8.0  # the largest power of the base decay exp(-softplus Λ): at r = 1
MIN_DECAY, MAX_DECAY = 0.9, 0.999  # initial range of the base decay


@dataclass(frozen=True)
class RGLRU(Body):
    mixes: ClassVar[bool] = True

    heads: int
    hidden: int | None = None  # channels; None: the width
    taps: int = 4
    activation: Activation = "gelu_tanh"

    def check(self) -> None:
        for name in ("heads", "hidden", "taps"):
            value = getattr(self, name)
            require(value is None or value > 0, f"rg_lru: {name}={value} must be positive")

    def size(self, width: int) -> int:
        """Number of channels in a stack of this width."""
        size = self.hidden or width
        if size % self.heads:
            choices = ", ".join(map(str, divisors(size)))
            raise SpecError(f"rg_lru: {size} channels are not divisible by heads={self.heads}; choose one of {choices}")
        return size

    def build(self, width: int) -> nn.Module:
        return RGLRUModule(width, self)

    def memory(self, width: int) -> FixedSize:
        size = self.size(width)
        return FixedSize({"conv": (self.taps - 1, size), "h": (size,)})

    def flops(self, width: int, tokens: int, keys: int) -> int:
        size = self.size(width)
        return 2 * tokens * size * (3 * width + 2 * size // self.heads)


class RGLRUModule(nn.Module):
    attention_taps: tuple[str, ...] = ("input",)
    reads_source = False
    map_kind = MapKind("RG-LRU", signed=False, channels=True)

    def __init__(self, width: int, spec: RGLRU):
        super().__init__()
        size = spec.size(width)
        self.memory, self.heads = spec.memory(width), spec.heads
        self.in_proj = nn.Linear(width, size)
        self.gate_proj = nn.Linear(width, size)
        self.conv = ConvWeights(spec.taps, size, bias=True)
        self.r_proj = BlockDiagonal(spec.heads, size // spec.heads)
        self.i_proj = BlockDiagonal(spec.heads, size // spec.heads)
        self.rate = initial_rates(size)
        self.o_proj = nn.Linear(size, width)
        self.activation = ACTIVATIONS[spec.activation]
        self.v, self.z = Tap(), Tap()  # u and h, (B, L, F)

    def forward(self, x: Tensor, layout: TokenLayout, state: FixedState = STATELESS) -> Tensor:
        past = state.read(layout, **self.memory.zeros(x))
        out, tail, h = chunked_forward(self.run_chunk, x, layout, past, whole=self.v.hooked or self.z.hooked)
        state.write(layout, conv=tail, h=h)
        return out

    def run_chunk(self, x: Tensor, layout: TokenLayout, tail: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (B, L, D), tail of the convolution (B, k - 1, F), state (B, F) -> out (B, L, D), new tail, new state."""
        u, tail = convolve(self.in_proj(x), self.conv.weight, self.conv.bias, tail, layout)  # (B, L, F)
        log_decay, factor = self.gates(u, layout, h.dtype)
        hs = linear_recurrence(log_decay.exp(), factor * self.v(u), h, layout.documents, layout.valid)  # (B, L, F)
        return self.o_proj(self.z(hs.to(x.dtype)) * self.activation(self.gate_proj(x))), tail, hs[:, -1]

    def gates(self, u: Tensor, layout: TokenLayout, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """log a and √(1 - a²) ⊙ i, both (B, L, F)"""
        r, i = (gate(u).to(dtype).sigmoid() for gate in (self.r_proj, self.i_proj))
        log_decay = -DECAY_EXPONENT * r * F.softplus(self.rate.to(dtype))  # log a
        # tiny: the root of 0 has no gradient
        scale = (-torch.expm1(2 * log_decay)).clamp_min(torch.finfo(dtype).tiny).sqrt()
        return log_decay, scale.where(layout.positions.unsqueeze(-1) > 0, 1.0) * i

    def attention_map(self, taps: Mapping[str, Tensor], layout: TokenLayout, heads: slice = slice(None)) -> Tensor:
        """The mean of (Π_{j<s≤t} a_s) √(1 - a_j²) i_j over the channels of each head"""
        x = taps["input"]
        tail = self.memory.zeros(x)["conv"]
        u, _ = convolve(self.in_proj(x), self.conv.weight, self.conv.bias, tail, layout)
        groups = range(self.heads)[heads]
        size = u.shape[-1] // self.heads
        channels = slice(groups.start * size, groups.stop * size)
        log_decay, factor = (gate[..., channels].unsqueeze(-1) for gate in self.gates(u, layout, tail.dtype))
        ones = torch.ones_like(factor)
        return mean_over_channels(ones, factor, log_decay, len(groups), layout.documents, layout.valid)


class BlockDiagonal(nn.Module):
    """A block-diagonal linear layer, one block per head."""

    weight_decay = ("weight",)

    def __init__(self, heads: int, size: int):
        super().__init__()
        bound = size**-0.5
        self.weight = nn.Parameter(torch.empty(heads, size, size).uniform_(-bound, bound))  # (H, columns, rows)
        self.bias = nn.Parameter(torch.zeros(heads, size))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("blhi,hio->blho", x.unflatten(-1, self.bias.shape), self.weight)
        return (y + self.bias).flatten(-2)


def initial_rates(count: int) -> nn.Parameter:
    """(count,) Λ such that the square of exp(-softplus Λ) is uniform; the inverse of softplus is log(exp x - 1)."""
    decays = uniform(count, MIN_DECAY**2, MAX_DECAY**2).sqrt()
    return filled((-decays.log()).expm1().log(), count)
