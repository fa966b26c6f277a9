"""Linear attention as a mixer: attention whose memory does not grow, φ(x) = elu(x) + 1 for queries and keys.

The equation and its one chunked computation stand in kernels/linear_attention.py. Katharopoulos et al. 2020.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.at import At
from regard.kernels.linear_attention import flops, linear_attention
from regard.parts.attention import merge, split
from regard.parts.body import Body
from regard.parts.state import FRESH, Fixed, FixedState
from regard.spec import require


@dataclass(frozen=True)
class LinearAttention(Body):
    mixes: ClassVar[bool] = True

    heads: int
    bias: bool = False

    def check(self) -> None:
        require(self.heads > 0, f"linear_attention: heads={self.heads} must be positive")

    def head_dim(self, width: int) -> int:
        require(width % self.heads == 0, f"linear_attention: width={width} is not divisible by heads={self.heads}")
        return width // self.heads

    def build(self, width: int) -> nn.Module:
        return LinearAttentionModule(width, self)

    def memory(self, width: int) -> Fixed:
        return Fixed({"sums": (self.heads, self.head_dim(width), self.head_dim(width) + 1)})

    def flops(self, width: int, tokens: int, seen: int) -> int:
        return tokens * 8 * width * width + self.heads * flops(self.head_dim(width), tokens)


class LinearAttentionModule(nn.Module):
    def __init__(self, width: int, spec: LinearAttention):
        super().__init__()
        self.heads, self.head_dim = spec.heads, spec.head_dim(width)
        self.q_proj = nn.Linear(width, width, bias=spec.bias)
        self.k_proj = nn.Linear(width, width, bias=spec.bias)
        self.v_proj = nn.Linear(width, width, bias=spec.bias)
        self.o_proj = nn.Linear(width, width, bias=spec.bias)

    def forward(self, x: Tensor, at: At, state: FixedState = FRESH) -> Tensor:
        q = F.elu(split(self.q_proj(x), self.heads)) + 1  # (B, H, L, E)
        k = F.elu(split(self.k_proj(x), self.heads)) + 1  # (B, H, L, E)
        v = split(self.v_proj(x), self.heads)  # (B, H, L, E)
        wide = torch.promote_types(x.dtype, torch.float32)
        empty = x.new_zeros(len(x), self.heads, self.head_dim, self.head_dim + 1, dtype=wide)
        (past,) = state.read(at, sums=empty)  # (B, H, E, E + 1)
        out, past = linear_attention(q, k, v, past, at.segments, at.valid)
        state.write(at, sums=past)
        return self.o_proj(merge(out.to(x.dtype)))
