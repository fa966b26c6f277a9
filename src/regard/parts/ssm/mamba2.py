"""Mamba-2: a selective state space with one decay rate per head, which makes it linear attention with a decay.

    x, B, C = silu(conv(W x))        Δ = softplus(W_Δ x + b)        out = W_o norm(y ⊙ silu(W_g x))
    S_t = exp(Δ_t a) S_{t-1} + B_t (Δ_t x_t)ᵀ        y_t = S_tᵀ C_t + d x_t          a < 0 and d: one number per head

B are the keys, C the queries and Δ x the values of the scan (kernels/recurrent/linear_scan), which computes it by
matrix products ("state-space duality"). Heads of a group share B and C. Dao & Gu 2024. Zamba2 normalizes the channels
of each group separately (`norm_parts` = `groups`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.kernels.convolution import convolve
from regard.kernels.recurrent.implied_map import scan_map
from regard.kernels.recurrent.linear_scan import ScanInputs, backend, flops
from regard.layout import TokenLayout
from regard.parts.body import Body
from regard.parts.norm import Norm, RMSNorm
from regard.parts.split_heads import divisors, merge_heads, split_heads
from regard.parts.ssm.selective import ConvWeights, chunked_forward, log_rates, step_bias
from regard.parts.state import STATELESS, FixedSize, FixedState
from regard.parts.tap import MapKind, Tap
from regard.spec import SpecError, require


@dataclass(frozen=True)
class Mamba2(Body):
    mixes: ClassVar[bool] = True

    state: int = 128  # N, rows of a head's state
    head_dim: int = 64  # columns of a head's state
    expand: int = 2  # channels / width
    groups: int = 1  # groups of heads that share B and C
    taps: int = 4
    bias: bool = False
    conv_bias: bool = True
    norm: Norm = RMSNorm(1e-5)  # of the gated output
    norm_parts: int = 1  # groups of channels that are normalized separately
    shortest: float | None = None  # lower limit of Δ
    longest: float | None = None  # upper limit of Δ

    def check(self) -> None:
        for name in ("state", "head_dim", "expand", "groups", "taps", "norm_parts"):
            require(getattr(self, name) > 0, f"mamba2: {name}={getattr(self, name)} must be positive")
        require(
            (self.shortest or 0.0) >= 0 and (self.longest is None or self.longest > (self.shortest or 0.0)),
            f"mamba2: shortest={self.shortest} and longest={self.longest} must satisfy 0 <= shortest < longest",
        )

    def sizes(self, width: int) -> tuple[int, int]:
        """(heads, channels) in a stack of this width."""
        channels = self.expand * width
        if channels % self.head_dim:
            raise SpecError(
                f"mamba2: {channels} channels (expand × width) are not divisible by head_dim={self.head_dim}; "
                f"choose one of {', '.join(map(str, divisors(channels)))}"
            )
        heads = channels // self.head_dim
        for name in ("groups", "norm_parts"):
            if heads % (count := getattr(self, name)):
                choices = ", ".join(map(str, divisors(heads)))
                raise SpecError(f"mamba2: {heads} heads are not divisible by {name}={count}; choose one of {choices}")
        return heads, channels

    def build(self, width: int) -> nn.Module:
        return Mamba2Module(width, self)

    def memory(self, width: int) -> FixedSize:
        heads, channels = self.sizes(width)
        convolved = channels + 2 * self.groups * self.state
        return FixedSize({"conv": (self.taps - 1, convolved), "ssm": (heads, self.state, self.head_dim)})

    def flops(self, width: int, tokens: int, keys: int) -> int:
        heads, channels = self.sizes(width)
        rows = 3 * channels + 2 * self.groups * self.state + heads
        return 2 * tokens * width * rows + flops(self.state, self.head_dim, tokens, heads, self.groups)


class Mamba2Projections(NamedTuple):
    u: Tensor  # (B, H, L, P)
    B: Tensor  # (B, G, L, N)
    C: Tensor  # (B, G, L, N)
    delta: Tensor  # (B, H, L)
    log_decay: Tensor  # (B, H, L)
    tail: Tensor  # of the convolution, (B, k - 1, F + 2 G N)


class Mamba2Module(nn.Module):
    attention_taps: tuple[str, ...] = ("input",)
    reads_source = False
    map_kind = MapKind("Mamba-2")

    def __init__(self, width: int, spec: Mamba2):
        super().__init__()
        self.heads, channels = spec.sizes(width)
        self.groups, self.limits, self.memory = spec.groups, (spec.shortest, spec.longest), spec.memory(width)
        shared = spec.groups * spec.state
        self.in_proj = nn.Linear(width, channels, bias=spec.bias)
        self.gate_proj = nn.Linear(width, channels, bias=spec.bias)
        self.b_proj = nn.Linear(width, shared, bias=spec.bias)
        self.c_proj = nn.Linear(width, shared, bias=spec.bias)
        self.conv = ConvWeights(spec.taps, channels + 2 * shared, spec.conv_bias)
        self.step_proj = nn.Linear(width, self.heads, bias=spec.bias)
        self.step_bias = step_bias(self.heads)
        self.A_log = log_rates(self.heads)
        self.D = nn.Parameter(torch.ones(self.heads))
        parts = spec.norm_parts
        self.norms = nn.ModuleList(spec.norm.build(channels // parts) for _ in range(parts))
        self.o_proj = nn.Linear(channels, width, bias=spec.bias)
        self.v, self.z = Tap(), Tap()  # u and y of each head, (B, H, L, P)
        self.scan = backend("auto")

    def forward(self, x: Tensor, layout: TokenLayout, state: FixedState = STATELESS) -> Tensor:
        past = state.read(layout, **self.memory.zeros(x))
        hooked = self.v.hooked or self.z.hooked
        out, tail, past = chunked_forward(self.run_chunk, x, layout, past, whole=hooked)
        state.write(layout, conv=tail, ssm=past)
        return out

    def run_chunk(self, x: Tensor, layout: TokenLayout, tail: Tensor, past: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (B, L, D), tail (B, k - 1, F + 2 G N), state (B, H, N, P) -> out (B, L, D), new tail, new state."""
        u, B, C, delta, log_decay, tail = self.project(x, layout, tail, past.dtype)
        u = self.v(u)
        inputs = ScanInputs(C, B, u * delta.unsqueeze(-1), log_decay, past, layout.documents, layout.valid)
        y, past = self.scan(inputs)
        y = merge_heads(self.z(y + u * self.D.view(-1, 1, 1)))  # (B, L, F)
        return self.o_proj(self.normalize(y * F.silu(self.gate_proj(x)).to(y.dtype)).to(x.dtype)), tail, past

    def project(self, x: Tensor, layout: TokenLayout, tail: Tensor, dtype: torch.dtype) -> Mamba2Projections:
        columns = [self.in_proj(x), self.b_proj(x), self.c_proj(x)]
        mixed, tail = convolve(torch.cat(columns, -1), self.conv.weight, self.conv.bias, tail, layout)
        u, B, C = F.silu(mixed).split([column.shape[-1] for column in columns], -1)
        u = split_heads(u, self.heads)  # (B, H, L, P)
        B, C = split_heads(B, self.groups), split_heads(C, self.groups)  # (B, G, L, N)
        step = self.step_proj(x).to(dtype) + self.step_bias
        delta = self.clamp_step(F.softplus(step)).transpose(1, 2)  # (B, H, L)
        log_decay = delta * -self.A_log.to(dtype).exp().unsqueeze(-1)
        return Mamba2Projections(u, B, C, delta, log_decay, tail)

    def attention_map(self, taps: Mapping[str, Tensor], layout: TokenLayout, heads: slice = slice(None)) -> Tensor:
        """(C_tᵀ B_j) exp(Σ_{j<s≤t} Δ_s a) Δ_j, and d on the diagonal"""
        x = taps["input"]
        tail = self.memory.zeros(x)["conv"]
        _, B, C, delta, log_decay, _ = self.project(x, layout, tail, tail.dtype)
        B, C = (group.repeat_interleave(self.heads // self.groups, 1)[:, heads] for group in (B, C))
        delta, log_decay = delta[:, heads], log_decay[:, heads]
        weights = scan_map(C, B, log_decay, layout.documents, layout.valid, delta.shape[1]) * delta.unsqueeze(2)
        return weights + torch.diag_embed(self.D[heads].view(-1, 1).expand_as(delta))

    def normalize(self, y: Tensor) -> Tensor:
        parts = y.chunk(len(self.norms), -1)
        return torch.cat([norm(part) for norm, part in zip(self.norms, parts, strict=True)], -1)

    def clamp_step(self, delta: Tensor) -> Tensor:
        return delta if self.limits == (None, None) else delta.clamp(*self.limits)
