"""Pooling: one vector per sequence or image from the hidden states of its tokens.

    cls        the first token                              BERT, ViT
    mean       the mean of all tokens                       Reimers & Gurevych 2019
    last       the last token                               CLIP's text encoder, embedding models from decoders
    cls_mean   the first token and the mean of the others, concatenated          DINOv2's classifier

Each is a weighted mean over the tokens. Padding has weight 0, and a packed row gives one vector per document.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from regard.layout import TokenLayout

Pool = Literal["cls", "mean", "last", "cls_mean"]


class Pooling(nn.Module):
    def __init__(self, how: Pool):
        super().__init__()
        self.how: Pool = how

    def forward(self, x: Tensor, layout: TokenLayout) -> Tensor:
        return pool(x, layout, self.how)


def pooled_dim(width: int, how: Pool) -> int:
    return 2 * width if how == "cls_mean" else width


def pool(x: Tensor, layout: TokenLayout, how: Pool) -> Tensor:
    """(B, L, D) -> (B, D), or for packed rows (B, N, D): one vector per document, zeros past a row's last."""
    parts = ("cls", "rest") if how == "cls_mean" else (how,)
    return torch.cat(
        [mean(x, layout, choose(document_members(layout), layout.positions.unsqueeze(1), part)) for part in parts], -1
    )


def mean(x: Tensor, layout: TokenLayout, chosen: Tensor) -> Tensor:
    """The mean over the tokens that `chosen` (B, N, L) marks for each document."""
    wide = torch.promote_types(x.dtype, torch.float32)
    chosen = chosen.to(wide)
    weights = chosen / chosen.sum(-1, keepdim=True).clamp_min(1)
    y = (weights @ x.to(wide)).to(x.dtype)  # (B, N, D)
    return y.squeeze(1) if layout.segments is None else y


def document_members(layout: TokenLayout) -> Tensor:
    """(B, N, L) True where token l is valid and belongs to document n."""
    valid = torch.ones_like(layout.positions, dtype=torch.bool) if layout.valid is None else layout.valid
    if layout.segments is None:
        return valid.unsqueeze(1)
    documents = torch.arange(int(layout.segments.where(valid, -1).max()) + 1, device=valid.device)
    return (layout.segments.unsqueeze(1) == documents.view(1, -1, 1)) & valid.unsqueeze(1)


def choose(members: Tensor, positions: Tensor, how: Pool | Literal["rest"]) -> Tensor:
    if how == "mean":
        return members
    if how == "rest":
        return members & (positions > 0)
    place = positions.where(members, -1).amax(-1, keepdim=True) if how == "last" else 0
    return members & (positions == place)
