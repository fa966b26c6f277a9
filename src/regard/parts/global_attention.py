"""Attention with separate projections for global tokens: Longformer's (Beltagy et al. 2020).

    token i is global:   z_i = Σ_j softmax(q'_i k'_jᵀ) v'_j        over all tokens
    all other tokens:    z_i = Σ_j softmax(q_i k_jᵀ) v_j           over its window and the global tokens

q', k' and v' are a second set of projections of all tokens; both results are projected by one W_o. The mask's first
tokens (`first_tokens`) are the global ones. With a mask that has none, such as a window, the second set is unused.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.kernels.attention.mask import Mask
from regard.kernels.attention.patterns.longformer import Longformer
from regard.layout import TokenLayout
from regard.parts.attention import Attention, AttentionModule
from regard.parts.state import STATELESS, State
from regard.spec import require


@dataclass(frozen=True)
class GlobalAttention(Attention):
    mask: Mask = Longformer(256)

    def check(self) -> None:
        super().check()
        require(
            not self.mask.causal,
            f"global_attention: mask={self.mask} is causal, but global tokens attend to all; choose Longformer",
        )

    def build(self, width: int) -> nn.Module:
        return GlobalAttentionModule(width, self)

    def flops(self, width: int, tokens: int, keys: int) -> int:
        flops = super().flops(width, tokens, keys)
        return 2 * flops if self.mask.first_tokens else flops


class GlobalAttentionModule(AttentionModule):
    def __init__(self, width: int, spec: GlobalAttention):
        super().__init__(width, spec)
        self.of_globals = AttentionModule(width, spec)
        self.of_globals.add_module("o_proj", nn.Identity())  # the o_proj of this module projects both
        self.first = spec.mask.first_tokens
        if self.first:
            self.attention_taps = ("q", "k", "of_globals.q", "of_globals.k")

    def forward(self, x: Tensor, layout: TokenLayout, state: State = STATELESS) -> Tensor:
        out = super().forward(x, layout, state)  # (B, L, D)
        if not self.first:
            return out
        global_out = self.o_proj(self.of_globals(x, layout))  # (B, L, D); only global tokens' rows are used
        return torch.where((layout.positions < self.first).unsqueeze(-1), global_out, out)

    def attention_map(self, taps: Mapping[str, Tensor], layout: TokenLayout, heads: slice = slice(None)) -> Tensor:
        weights = super().attention_map(taps, layout, heads)  # (B, heads, L, S)
        if not self.first:
            return weights
        of_globals = self.of_globals.attention_map({name: taps[f"of_globals.{name}"] for name in "qk"}, layout, heads)
        return torch.where((layout.positions < self.first)[:, None, :, None], of_globals, weights)
