"""One vector for a whole text or image, taken from those of its tokens.

    cls    that of the first token          BERT, ViT
    mean   their mean                       Reimers & Gurevych 2019
    last   that of the last token           CLIP's text, embedders made of decoders: it alone has seen all

Each is a row of weights over the tokens, so padding weighs nothing wherever it stands, and of a packed row every
document gets its own vector.
"""

from typing import Literal

import torch
from torch import Tensor

from regard.at import At

Pool = Literal["cls", "mean", "last"]


def pool(x: Tensor, at: At, how: Pool) -> Tensor:
    """(B, L, D) -> (B, D); of packed rows (B, N, D), one vector a document, zeros where a row has fewer than N."""
    wide = torch.promote_types(x.dtype, torch.float32)
    chosen = choose(members(at), at.positions.unsqueeze(1), how).to(wide)  # (B, N, L)
    weights = chosen / chosen.sum(-1, keepdim=True).clamp_min(1)
    y = (weights @ x.to(wide)).to(x.dtype)  # (B, N, D)
    return y.squeeze(1) if at.segments is None else y


def members(at: At) -> Tensor:
    """(B, N, L) True where a valid token belongs to the document."""
    valid = torch.ones_like(at.positions, dtype=torch.bool) if at.valid is None else at.valid
    if at.segments is None:
        return valid.unsqueeze(1)
    documents = torch.arange(int(at.segments.where(valid, -1).max()) + 1, device=valid.device)
    return (at.segments.unsqueeze(1) == documents.view(1, -1, 1)) & valid.unsqueeze(1)


def choose(members: Tensor, positions: Tensor, how: Pool) -> Tensor:
    if how == "mean":
        return members
    place = positions.where(members, -1).amax(-1, keepdim=True) if how == "last" else 0
    return members & (positions == place)
