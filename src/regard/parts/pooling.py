"""Pooling: one vector per sequence or image from the hidden states of its tokens.

    cls         the first token                              BERT, ViT
    mean        the mean of all tokens                       Reimers & Gurevych 2019
    last        the last token                               CLIP's text encoder, embedding models from decoders
    cls_mean    the first token and the mean of the others, concatenated          DINOv2's classifier
    attention   z = attention(p, x), z = z + feedforward(norm(z)) for one learned query p
                                                             Lee et al. 2019; for images Zhai et al. 2022

The first four are weighted means with fixed weights; those of attention pooling are learned. Padding has weight 0, and
a packed row yields one vector per document.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from regard.layout import Source, TokenLayout
from regard.parts.cross_attention import CrossAttention
from regard.parts.feedforward import FeedForward, PositionWise
from regard.parts.norm import LayerNorm, Norm
from regard.spec import Spec

Pool = Literal["cls", "mean", "last", "cls_mean"]


class Pooling(nn.Module):
    def __init__(self, method: Pool):
        super().__init__()
        self.method: Pool = method

    def forward(self, x: Tensor, layout: TokenLayout) -> Tensor:
        return pool(x, layout, self.method)


def pooled_dim(width: int, method: Pool) -> int:
    return 2 * width if method == "cls_mean" else width


def pool(x: Tensor, layout: TokenLayout, method: Pool) -> Tensor:
    """(B, L, D) -> (B, D), or for packed rows (B, N, D): one vector per document, zeros after a row's last document."""
    members, positions = document_members(layout), layout.positions.unsqueeze(1)
    methods = ("cls", "without_cls") if method == "cls_mean" else (method,)
    return torch.cat([mean_of_tokens(x, layout, select_tokens(members, positions, m)) for m in methods], -1)


def mean_of_tokens(x: Tensor, layout: TokenLayout, selected: Tensor) -> Tensor:
    """The mean over the tokens that are True in `selected` (B, N, L), per document."""
    wide = torch.promote_types(x.dtype, torch.float32)
    selected = selected.to(wide)
    weights = selected / selected.sum(-1, keepdim=True).clamp_min(1)
    y = (weights @ x.to(wide)).to(x.dtype)  # (B, N, D)
    return y.squeeze(1) if layout.segments is None else y


def document_members(layout: TokenLayout) -> Tensor:
    """(B, N, L) True where token l is valid and belongs to document n."""
    valid = torch.ones_like(layout.positions, dtype=torch.bool) if layout.valid is None else layout.valid
    if layout.segments is None:
        return valid.unsqueeze(1)
    documents = torch.arange(int(layout.segments.where(valid, -1).max()) + 1, device=valid.device)
    return (layout.segments.unsqueeze(1) == documents.view(1, -1, 1)) & valid.unsqueeze(1)


def select_tokens(members: Tensor, positions: Tensor, method: Pool | Literal["without_cls"]) -> Tensor:
    """The members (B, N, L) of each document over which the mean is taken."""
    if method == "mean":
        return members
    if method == "without_cls":
        return members & (positions > 0)
    position = positions.where(members, -1).amax(-1, keepdim=True) if method == "last" else 0
    return members & (positions == position)


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
        """(B, L, D) -> (B, D), or for packed rows (B, N, D): one vector per document"""
        documents = document_members(layout).shape[1]
        query = self.query.expand(len(x), documents, -1)  # (B, N, D)
        numbers = torch.arange(documents, device=x.device).expand(len(x), -1)
        packed = layout.segments is not None
        queries = TokenLayout(torch.zeros_like(numbers), numbers if packed else None).with_source(Source(x, layout))
        z = self.attention(query, queries)  # (B, N, D)
        z = z + self.feedforward(self.norm(z))
        return z if packed else z.squeeze(1)
