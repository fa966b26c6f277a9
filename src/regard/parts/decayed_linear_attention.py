"""Linear attention whose memory fades: what retention and gated linear attention share.

    S_t = diag(a_t) S_{t-1} + k_t v_tᵀ          out = W_o (norm(S_tᵀ q_t / √N) ⊙ silu(W_g x))

Nothing is divided by a sum of weights: each head's output is normalized instead, so scores may have any sign. What a_t
is, 0 < a ≤ 1, a subclass says. The recurrence is the scan of kernels/scan.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from regard.kernels.recurrent.linear_scan import backend, flops
from regard.layout import TokenLayout
from regard.parts.body import Body
from regard.parts.heads import merge_heads, split_heads
from regard.parts.norm import Norm, RMSNorm
from regard.parts.state import STATELESS, FixedSize, FixedState
from regard.spec import require


@dataclass(frozen=True)
class DecayedLinearAttention(Body):
    mixes: ClassVar[bool] = True

    heads: int
    key_dim: int | None = None  # of a head
    value_dim: int | None = None  # of a head; None: width / heads
    norm: Norm = RMSNorm()  # of each head's output
    gate: bool = True  # is the output multiplied by silu(W_g x)?

    def check(self) -> None:
        for name in ("heads", "key_dim", "value_dim"):
            value = getattr(self, name)
            require(value is None or value > 0, f"{self.kind}: {name}={value} must be positive")

    def sizes(self, width: int) -> tuple[int, int]:
        """(key_dim, value_dim) in a stack this wide."""
        whole = self.key_dim and self.value_dim or width % self.heads == 0
        require(bool(whole), f"{self.kind}: width={width} is not divisible by heads={self.heads}; give their sizes")
        return self.key_dim or self.usual_key_dim(width), self.value_dim or width // self.heads

    def usual_key_dim(self, width: int) -> int:
        return width // self.heads

    def memory(self, width: int) -> FixedSize:
        return FixedSize({"sums": (self.heads, *self.sizes(width))})

    def products(self, width: int, tokens: int, channels: bool = False) -> int:
        """Floating-point operations without those that make the decay; `channels`: it differs by key channel."""
        key_dim, value_dim = self.sizes(width)
        rows = self.heads * (2 * key_dim + (3 if self.gate else 2) * value_dim)
        return 2 * tokens * width * rows + flops(key_dim, value_dim, tokens, self.heads, channels=channels)


class DecayedLinearAttentionModule(nn.Module):
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
        self.scan = backend("auto")

    def forward(self, x: Tensor, layout: TokenLayout, state: FixedState = STATELESS) -> Tensor:
        q = split_heads(self.q_proj(x), self.heads) * self.key_dim**-0.5  # (B, H, L, N)
        k = split_heads(self.k_proj(x), self.heads)  # (B, H, L, N)
        v = split_heads(self.v_proj(x), self.heads)  # (B, H, L, P)
        q, k = self.placed(q, k, layout)
        (sums,) = state.read(layout, **self.memory.zeros(x))  # (B, H, N, P)
        out, sums = self.scan(q, k, v, self.decay(x), sums, layout.documents, layout.valid)
        state.write(layout, sums=sums)
        out = merge_heads(self.norm(out.to(x.dtype)))  # (B, L, H·P)
        return self.o_proj(out if self.gate_proj is None else out * F.silu(self.gate_proj(x)))

    def placed(self, q: Tensor, k: Tensor, layout: TokenLayout) -> tuple[Tensor, Tensor]:
        """Queries and keys that know their positions; here they know none."""
        return q, k

    def decay(self, x: Tensor) -> Tensor:
        """log a: (H,), (B, H, L) or (B, H, L, N)"""
        raise NotImplementedError
