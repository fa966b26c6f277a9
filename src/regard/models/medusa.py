"""Medusa heads: small heads on the last hidden state of a decoder.

Head k predicts the token k positions after the next.

    x_k = h + SiLU(W_k h + b_k)          logits_k = U_k x_k          k = 1 … K

W_k and b_k start at 0 and U_k as the decoder's own head, so that all heads begin as copies of it. With `shared` there
are no U_k, and the decoder's head is used: far fewer weights to read with a large vocabulary, and a weaker head.
Cai et al. 2024.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.models.base import Model, Scheme
from regard.models.decoder import Decoder, DecoderModule
from regard.models.outputs import LazyLogits
from regard.spec import require


@dataclass(frozen=True)
class MedusaHeads(Model["MedusaHeadsModule"]):
    vocab: int
    width: int  # of the hidden states that the decoder's head projects
    heads: int = 4
    shared: bool = False  # all heads use the decoder's head, instead of one each
    head_bias: bool = False

    def check(self) -> None:
        for name in ("vocab", "width", "heads"):
            require(getattr(self, name) > 0, f"medusa: {name}={getattr(self, name)} must be positive")

    @classmethod
    def of(cls, target: Decoder, heads: int = 4, shared: bool = False) -> "MedusaHeads":
        return cls(target.vocab, target.table_dim, heads, shared, target.head_bias and not shared)

    def module(self, scheme: Scheme) -> "MedusaHeadsModule":
        return MedusaHeadsModule(self)


class MedusaHeadsModule(nn.Module):
    no_muon = ("outputs",)

    def __init__(self, spec: MedusaHeads):
        super().__init__()
        self.spec = spec
        self.blocks = nn.ModuleList(nn.Linear(spec.width, spec.width) for _ in range(spec.heads))
        outputs = 0 if spec.shared else spec.heads
        self.outputs = nn.ModuleList(nn.Linear(spec.width, spec.vocab, bias=spec.head_bias) for _ in range(outputs))
        for parameter in self.blocks.parameters():
            nn.init.zeros_(parameter)

    @torch.no_grad()
    def copy_head(self, target: DecoderModule) -> None:
        """Start from the decoder's own head."""
        for output in self.outputs:
            for name, parameter in output.named_parameters():
                parameter.copy_(getattr(target.head, name))

    def forward(self, hidden: Tensor, target: DecoderModule) -> list[Tensor | LazyLogits]:
        """hidden (…, D), which the head of `target` projects -> the logits (…, V) of each head"""
        states = [hidden + F.silu(block(hidden)) for block in self.blocks]
        if self.spec.shared:
            return [target.lazy_logits(x) for x in states]
        weights = [dict(output.named_parameters()) for output in self.outputs]
        scale, softcap = target.spec.logit_scale, target.spec.softcap
        return [
            LazyLogits(x, own["weight"], own.get("bias"), scale, softcap)
            for x, own in zip(states, weights, strict=True)
        ]
