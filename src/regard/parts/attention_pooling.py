"""Attention pooling: one learned query reads all tokens and says what they are together.

    z = attention(p, x)      z = z + feedforward(norm(z))          Lee et al. 2019; on images Zhai et al. 2022

Where the rules of `pooling` fix how much each token weighs, here it is learned. Padding is not seen, and of a packed
row every document gets an answer of its own.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.layout import Source, TokenLayout
from regard.parts.cross_attention import CrossAttention
from regard.parts.feedforward import FeedForward, PositionWise
from regard.parts.norm import LayerNorm, Norm
from regard.parts.pooling import document_members
from regard.spec import Spec


@dataclass(frozen=True)
class AttentionPooling(Spec):
    attention: CrossAttention
    feedforward: PositionWise = FeedForward()
    norm: Norm = LayerNorm()

    def build(self, width: int) -> nn.Module:
        return AttentionPoolingModule(width, self)


class AttentionPoolingModule(nn.Module):
    def __init__(self, width: int, spec: AttentionPooling):
        super().__init__()
        self.query = nn.Parameter(nn.init.normal_(torch.empty(1, width), std=width**-0.5))
        self.attention = spec.attention.build(width)
        self.norm = spec.norm.build(width)
        self.feedforward = spec.feedforward.build(width)

    def forward(self, x: Tensor, layout: TokenLayout) -> Tensor:
        """(B, L, D) -> (B, D); of packed rows (B, N, D), one vector a document."""
        documents = document_members(layout).shape[1]
        query = self.query.expand(len(x), documents, -1)  # (B, N, D)
        numbers = torch.arange(documents, device=x.device).expand(len(x), -1)
        packed = layout.segments is not None
        asking = TokenLayout(torch.zeros_like(numbers), numbers if packed else None).with_source(Source(x, layout))
        z = self.attention(query, asking)  # (B, N, D)
        z = z + self.feedforward(self.norm(z))
        return z if packed else z.squeeze(1)
