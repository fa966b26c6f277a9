"""Gated linear attention: each token says how much of the memory it keeps, for every key channel.

    S_t = diag(a_t) S_{t-1} + k_t v_tᵀ          a_t = σ(W_2 W_1 x_t + b)^(1/τ)          W_1 of low rank

τ keeps a fresh model from forgetting at once. With `decay` "head" one number a head fades all its channels (a = σ(W x +
b)^(1/τ)), which is cheaper: the pairs of a chunk are then one product. Yang et al. 2023.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.parts.decayed_linear_attention import DecayedLinearAttention, DecayedLinearAttentionModule
from regard.parts.heads import split_heads
from regard.spec import require


@dataclass(frozen=True)
class GatedLinear(DecayedLinearAttention):
    decay: Literal["channel", "head"] = "channel"
    rank: int = 16
    temperature: float = 16.0

    def check(self) -> None:
        super().check()
        require(self.rank > 0, f"gated_linear: rank={self.rank} must be positive")
        require(self.temperature > 0, f"gated_linear: temperature={self.temperature} must be positive")

    def usual_key_dim(self, width: int) -> int:
        require(
            width % (2 * self.heads) == 0,
            f"gated_linear: keys are half as wide as the stream, and half of width={width} is not divisible by "
            f"heads={self.heads}; give key_dim",
        )
        return width // (2 * self.heads)

    def build(self, width: int) -> nn.Module:
        return GatedLinearModule(width, self)

    def flops(self, width: int, tokens: int, keys: int) -> int:
        channels = self.decay == "channel"
        made = self.rank * (width + self.heads * self.sizes(width)[0]) if channels else width * self.heads
        return 2 * tokens * made + self.products(width, tokens, channels)


class GatedLinearModule(DecayedLinearAttentionModule):
    def __init__(self, width: int, spec: GatedLinear):
        super().__init__(width, spec)
        self.channels, self.temperature = spec.decay == "channel", spec.temperature
        rank, rows = (spec.rank, self.heads * self.key_dim) if self.channels else (width, self.heads)
        self.low_proj = nn.Linear(width, rank, bias=False) if self.channels else nn.Identity()
        self.decay_proj = nn.Linear(rank, rows)

    def decay(self, x: Tensor) -> Tensor:
        logits = split_heads(self.decay_proj(self.low_proj(x)), self.heads)  # (B, H, L, N or 1)
        decay = F.logsigmoid(logits.to(torch.promote_types(x.dtype, torch.float32))) / self.temperature
        return decay if self.channels else decay.squeeze(-1)
