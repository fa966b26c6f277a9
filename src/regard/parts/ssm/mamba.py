"""Mamba: a selective state space, whose step Δ, input matrix B and output matrix C depend on the token.

    u = silu(conv(W_in x))        Δ = softplus(W_Δ W_r u + b)        B = W_B u        C = W_C u
    h_t = exp(Δ_t A) ⊙ h_{t-1} + Δ_t B_t u_t        y_t = C_t · h_t + D u_t        out = W_o (y ⊙ silu(W_g x))

Every channel has N states. A is constant, but exp(Δ_t A) is not: with Δ → 0 a token is skipped, with a large Δ the
state is reset. Gu & Dao 2023. Jamba (Lieber et al. 2024) and FalconMamba normalize the low-rank input of Δ, B and C.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.kernels.convolution import convolve
from regard.kernels.recurrent.implied_map import channel_groups, mean_over_channels
from regard.kernels.recurrent.selective_scan import SelectiveScanInputs, backend, flops
from regard.layout import TokenLayout
from regard.parts.body import Body
from regard.parts.norm import NoNorm, Norm
from regard.parts.ssm.selective import ConvWeights, chunked_forward, log_rates, step_bias
from regard.parts.state import STATELESS, FixedSize, FixedState
from regard.parts.tap import MapKind, Tap
from regard.spec import require


@dataclass(frozen=True)
class Mamba(Body):
    mixes: ClassVar[bool] = True

    state: int = 16  # N, per channel
    expand: int = 2  # channels / width
    rank: int | None = None  # of Δ's projection; None: width / 16, rounded up
    taps: int = 4
    bias: bool = False
    conv_bias: bool = True
    norm: Norm = NoNorm()  # of W_r u, B and C

    def check(self) -> None:
        for name in ("state", "expand", "taps"):
            require(getattr(self, name) > 0, f"mamba: {name}={getattr(self, name)} must be positive")
        require(self.rank is None or self.rank > 0, f"mamba: rank={self.rank} must be positive")

    def sizes(self, width: int) -> tuple[int, int]:
        """(channels, rank) in a stack of this width."""
        return self.expand * width, self.rank or -(-width // 16)

    def build(self, width: int) -> nn.Module:
        return MambaModule(width, self)

    def memory(self, width: int) -> FixedSize:
        channels, _ = self.sizes(width)
        return FixedSize({"conv": (self.taps - 1, channels), "ssm": (channels, self.state)})

    def flops(self, width: int, tokens: int, keys: int) -> int:
        channels, rank = self.sizes(width)
        columns = 3 * width + 2 * rank + 2 * self.state
        return 2 * tokens * channels * columns + flops(channels, self.state, tokens)


class MambaProjections(NamedTuple):
    u: Tensor  # (B, L, F)
    delta: Tensor  # (B, L, F) before bias and softplus
    B: Tensor  # (B, L, N)
    C: Tensor  # (B, L, N)
    tail: Tensor  # of the convolution, (B, k - 1, F)


class MambaModule(nn.Module):
    attention_taps: tuple[str, ...] = ("input",)
    reads_source = False
    map_kind = MapKind("Mamba", channels=True)

    def __init__(self, width: int, spec: Mamba):
        super().__init__()
        channels, rank = spec.sizes(width)
        self.memory, self.heads = spec.memory(width), channel_groups(channels)  # heads: groups of channels, of the map
        self.in_proj = nn.Linear(width, channels, bias=spec.bias)
        self.gate_proj = nn.Linear(width, channels, bias=spec.bias)
        self.conv = ConvWeights(spec.taps, channels, spec.conv_bias)
        self.rank_proj = nn.Linear(channels, rank, bias=False)
        self.b_proj = nn.Linear(channels, spec.state, bias=False)
        self.c_proj = nn.Linear(channels, spec.state, bias=False)
        self.rank_norm, self.b_norm, self.c_norm = (spec.norm.build(size) for size in (rank, spec.state, spec.state))
        self.step_proj = nn.Linear(rank, channels, bias=False)
        self.step_bias = step_bias(channels)
        self.A_log = log_rates(spec.state, channels)
        self.D = nn.Parameter(torch.ones(channels))
        self.o_proj = nn.Linear(channels, width, bias=spec.bias)
        self.v, self.z = Tap(), Tap()  # u and y, (B, L, F)
        self.scan = backend("auto")

    def forward(self, x: Tensor, layout: TokenLayout, state: FixedState = STATELESS) -> Tensor:
        past = state.read(layout, **self.memory.zeros(x))
        out, tail, h = chunked_forward(self.run_chunk, x, layout, past, whole=self.v.hooked or self.z.hooked)
        state.write(layout, conv=tail, ssm=h)
        return out

    def run_chunk(self, x: Tensor, layout: TokenLayout, tail: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (B, L, D), tail of the convolution (B, k - 1, F), state (B, F, N) -> out (B, L, D), new tail, new state."""
        u, delta, B, C, tail = self.project(x, layout, tail)
        A = -self.A_log.to(h.dtype).exp()  # (F, N)
        u = self.v(u)
        inputs = SelectiveScanInputs(u, delta, A, B, C, self.D, h, layout.documents, layout.valid, self.step_bias)
        y, h = self.scan(inputs)
        return self.o_proj(self.z(y.to(x.dtype)) * F.silu(self.gate_proj(x))), tail, h

    def project(self, x: Tensor, layout: TokenLayout, tail: Tensor) -> MambaProjections:
        u, tail = convolve(self.in_proj(x), self.conv.weight, self.conv.bias, tail, layout)
        u = F.silu(u)  # (B, L, F)
        delta = self.step_proj(self.rank_norm(self.rank_proj(u)))  # (B, L, F)
        return MambaProjections(u, delta, self.b_norm(self.b_proj(u)), self.c_norm(self.c_proj(u)), tail)

    def attention_map(self, taps: Mapping[str, Tensor], layout: TokenLayout, heads: slice = slice(None)) -> Tensor:
        """The mean of C_t · exp(Σ_{j<s≤t} Δ_s A) ⊙ Δ_j B_j over the channels of a group, and of D on the diagonal"""
        x, groups = taps["input"], range(self.heads)[heads]
        tail = self.memory.zeros(x)["conv"]
        _, delta, B, C, _ = self.project(x, layout, tail)
        size = len(self.D) // self.heads
        channels = slice(groups.start * size, groups.stop * size)
        delta = F.softplus(delta.to(tail.dtype) + self.step_bias)[..., channels].unsqueeze(-1)  # (B, L, F, 1)
        A, D = -self.A_log.to(tail.dtype).exp()[channels], self.D[channels]
        B, C = B.unsqueeze(2) * delta, C.unsqueeze(2).expand(-1, -1, len(A), -1)  # (B, L, F, N)
        weights = mean_over_channels(C, B, delta * A, len(groups), layout.documents, layout.valid)
        skip = D.view(len(groups), 1, -1).mean(-1).expand(len(x), -1, x.shape[1])  # (B, groups, L)
        return weights + torch.diag_embed(skip)
