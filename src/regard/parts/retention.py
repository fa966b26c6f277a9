"""Retention: each head forgets at a constant rate of its own, and turns as it goes.

    S_t = γ_h S_{t-1} + k_t v_tᵀ        γ_h = 1 - 2^(-5-h) for h = 0 … H-1        q, k turned as by RoPE

Head 0 forgets to a half within 22 tokens, each next head half as fast. Written for all tokens at once it is attention
without softmax, (Q Kᵀ ⊙ D) V with D_ij = γ^(i-j). Sun et al. 2023, "Retentive Network".
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.layout import TokenLayout
from regard.parts.decayed_linear_attention import DecayedLinearAttention, DecayedLinearAttentionModule
from regard.parts.position.rope import Rope
from regard.spec import require


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
        return self.products(width, tokens)


class RetentionModule(DecayedLinearAttentionModule):
    def __init__(self, width: int, spec: Retention):
        super().__init__(width, spec)
        self.position = Rope(spec.base).build(self.key_dim, self.heads) if spec.rotation else None

    def placed(self, q: Tensor, k: Tensor, layout: TokenLayout) -> tuple[Tensor, Tensor]:
        return (q, k) if self.position is None else self.position.rotate(q, k, layout)

    def decay(self, x: Tensor) -> Tensor:
        h = torch.arange(self.heads, dtype=torch.float64, device=x.device)
        return torch.log1p(-torch.exp2(-5 - h))
