"""Linear attention with a decaying state: retention and gated linear attention.

    S_t = diag(a_t) S_{t-1} + k_t v_tᵀ          out = W_o (norm(S_tᵀ q_t / √N) ⊙ silu(W_g x))          0 < a ≤ 1

    Retention      a = γ_h = 1 - 2^(-5-h) for h = 0 … H-1; q and k rotated by RoPE                Sun et al. 2023
    GatedLinear    a_t = σ(W_2 W_1 x_t + b)^(1/τ), W_1 of low rank                                Yang et al. 2023

There is no division by a sum of weights: the output of each head is normalized instead, so scores may have any sign.
Head 0 of retention has a half-life of 22 tokens, each next head twice that. Computed for all tokens at once, retention
is attention without softmax, (Q Kᵀ ⊙ D) V with D_ij = γ^(i-j). The recurrence is the scan of
kernels/recurrent/linear_scan.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.kernels.recurrent.implied_map import scan_map
from regard.kernels.recurrent.linear_scan import ScanInputs, backend, flops
from regard.layout import TokenLayout
from regard.parts.body import Body
from regard.parts.norm import Norm, RMSNorm
from regard.parts.position.rope import Rope
from regard.parts.split_heads import merge_heads, split_heads
from regard.parts.state import STATELESS, FixedSize, FixedState
from regard.parts.tap import MapKind, Tap
from regard.spec import require


@dataclass(frozen=True)
class DecayedLinearAttention(Body):
    mixes: ClassVar[bool] = True

    heads: int
    key_dim: int | None = None  # per head; None: width / heads, half of it in gated_linear
    value_dim: int | None = None  # per head; None: width / heads
    norm: Norm = RMSNorm()  # of each head's output
    gate: bool = True  # multiply the output by silu(W_g x)

    def check(self) -> None:
        for name in ("heads", "key_dim", "value_dim"):
            value = getattr(self, name)
            require(value is None or value > 0, f"{self.kind}: {name}={value} must be positive")

    def sizes(self, width: int) -> tuple[int, int]:
        """(key_dim, value_dim) in a stack of this width."""
        require(
            bool(self.key_dim and self.value_dim) or width % self.heads == 0,
            f"{self.kind}: width={width} is not divisible by heads={self.heads}; set key_dim and value_dim",
        )
        return self.key_dim or self.default_key_dim(width), self.value_dim or width // self.heads

    def default_key_dim(self, width: int) -> int:
        return width // self.heads

    def memory(self, width: int) -> FixedSize:
        return FixedSize({"sums": (self.heads, *self.sizes(width))})

    def flops_without_decay(self, width: int, tokens: int, channels: bool = False) -> int:
        """FLOPs of everything but the decay's projection; `channels`: one decay per key channel, not per head."""
        key_dim, value_dim = self.sizes(width)
        rows = self.heads * (2 * key_dim + (3 if self.gate else 2) * value_dim)
        return 2 * tokens * width * rows + flops(key_dim, value_dim, tokens, self.heads, channels=channels)


class DecayedLinearAttentionModule(nn.Module):
    attention_taps: tuple[str, ...] = ("q", "k", "input")  # the decay depends on the input
    reads_source = False
    map_kind = MapKind("decayed linear attention")

    def __init__(self, width: int, spec: DecayedLinearAttention):
        super().__init__()
        self.heads, self.memory = spec.heads, spec.memory(width)
        self.key_dim, value_dim = spec.sizes(width)
        self.q_proj = nn.Linear(width, self.heads * self.key_dim, bias=False)
        self.k_proj = nn.Linear(width, self.heads * self.key_dim, bias=False)
        self.v_proj = nn.Linear(width, self.heads * value_dim, bias=False)
        self.gate_proj = nn.Linear(width, self.heads * value_dim, bias=False) if spec.gate else None
        self.norm = spec.norm.build(value_dim)
        self.o_proj = nn.Linear(self.heads * value_dim, width, bias=False)
        self.q, self.k, self.v, self.z = Tap(), Tap(), Tap(), Tap()  # z: before the norm
        self.scan = backend("auto")

    def forward(self, x: Tensor, layout: TokenLayout, state: FixedState = STATELESS) -> Tensor:
        q = split_heads(self.q_proj(x), self.heads) * self.key_dim**-0.5  # (B, H, L, N)
        k = split_heads(self.k_proj(x), self.heads)  # (B, H, L, N)
        v = self.v(split_heads(self.v_proj(x), self.heads))  # (B, H, L, P)
        q, k = self.rotate(q, k, layout)
        q, k = self.q(q), self.k(k)
        (sums,) = state.read(layout, **self.memory.zeros(x))  # (B, H, N, P)
        out, sums = self.scan(ScanInputs(q, k, v, self.log_decay(x), sums, layout.documents, layout.valid))
        state.write(layout, sums=sums)
        out = merge_heads(self.norm(self.z(out.to(x.dtype))))  # (B, L, H·P)
        return self.o_proj(out if self.gate_proj is None else out * F.silu(self.gate_proj(x)))

    def attention_map(self, taps: Mapping[str, Tensor], layout: TokenLayout, heads: slice = slice(None)) -> Tensor:
        q, k, log_decay = taps["q"][:, heads], taps["k"][:, heads], self.log_decay(taps["input"])
        log_decay = log_decay[heads] if log_decay.dim() == 1 else log_decay[:, heads]
        return scan_map(q, k, log_decay, layout.documents, layout.valid, q.shape[1])

    def rotate(self, q: Tensor, k: Tensor, layout: TokenLayout) -> tuple[Tensor, Tensor]:
        """Queries and keys, rotated if the mixer has positions."""
        return q, k

    def log_decay(self, x: Tensor) -> Tensor:
        """log a: (H,), (B, H, L) or (B, H, L, N)"""
        raise NotImplementedError


@dataclass(frozen=True)
class Retention(DecayedLinearAttention):
    rotation: bool = True
    base: float = 10000.0  # of the rotation

    def check(self) -> None:
        super().check()
        require(self.base > 0, f"retention: base={self.base} must be positive")

    def build(self, width: int) -> nn.Module:
        return RetentionModule(width, self)

    def flops(self, width: int, tokens: int, keys: int) -> int:
        return self.flops_without_decay(width, tokens)


class RetentionModule(DecayedLinearAttentionModule):
    def __init__(self, width: int, spec: Retention):
        super().__init__(width, spec)
        self.position = Rope(spec.base).build(self.key_dim, self.heads) if spec.rotation else None

    def rotate(self, q: Tensor, k: Tensor, layout: TokenLayout) -> tuple[Tensor, Tensor]:
        return (q, k) if self.position is None else self.position.rotate(q, k, layout)

    def log_decay(self, x: Tensor) -> Tensor:
        h = torch.arange(self.heads, dtype=torch.float64, device=x.device)
        return torch.log1p(-torch.exp2(-5 - h))


@dataclass(frozen=True)
class GatedLinear(DecayedLinearAttention):
    """a = σ(W_2 W_1 x + b)^(1/τ) per key channel, or with decay="head" a = σ(W x + b)^(1/τ) per head.

    One decay per head is cheaper: the scores within a chunk are then one matrix product.
    """

    decay: Literal["channel", "head"] = "channel"
    rank: int = 16  # of W_1
    temperature: float = 16.0  # τ: initial decays are near 1

    def check(self) -> None:
        super().check()
        require(self.rank > 0, f"gated_linear: rank={self.rank} must be positive")
        require(self.temperature > 0, f"gated_linear: temperature={self.temperature} must be positive")

    def default_key_dim(self, width: int) -> int:
        require(
            width % (2 * self.heads) == 0,
            f"gated_linear: the default key_dim is width / (2 · heads), and half of width={width} is not divisible by "
            f"heads={self.heads}; set key_dim",
        )
        return width // (2 * self.heads)

    def build(self, width: int) -> nn.Module:
        return GatedLinearModule(width, self)

    def flops(self, width: int, tokens: int, keys: int) -> int:
        channels = self.decay == "channel"
        decay = self.rank * (width + self.heads * self.sizes(width)[0]) if channels else width * self.heads
        return 2 * tokens * decay + self.flops_without_decay(width, tokens, channels)


class GatedLinearModule(DecayedLinearAttentionModule):
    def __init__(self, width: int, spec: GatedLinear):
        super().__init__(width, spec)
        self.channels, self.temperature = spec.decay == "channel", spec.temperature
        rank, rows = (spec.rank, self.heads * self.key_dim) if self.channels else (width, self.heads)
        self.low_proj = nn.Linear(width, rank, bias=False) if self.channels else nn.Identity()
        self.decay_proj = nn.Linear(rank, rows)

    def log_decay(self, x: Tensor) -> Tensor:
        logits = split_heads(self.decay_proj(self.low_proj(x)), self.heads)  # (B, H, L, N or 1)
        log_decay = F.logsigmoid(logits.to(torch.promote_types(x.dtype, torch.float32))) / self.temperature
        return log_decay if self.channels else log_decay.squeeze(-1)
