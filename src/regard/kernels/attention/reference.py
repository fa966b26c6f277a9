"""Attention as its equation, in plain tensor algebra: the oracle of every other backend.

    out = softmax(q kᵀ · scale + bias) v      over the keys that the query sees

Sums and softmax run in at least float32. A query that sees no key gives zeros, with zero gradients.
"""

import torch
from torch import Tensor

from regard.at import At
from regard.kernels.attention.bias import Bias
from regard.kernels.attention.mask import Mask, visible
from regard.kernels.autocast import without_autocast


def attend(q: Tensor, k: Tensor, v: Tensor, at: At, mask: Mask, bias: Bias | None = None, scale: float = 1.0) -> Tensor:
    weights = attention_weights(q, k, at, mask, bias, scale)  # (B, H, L, S)
    with without_autocast(q.device):
        return (weights @ per_head(v, q).to(weights.dtype)).to(q.dtype)  # (B, H, L, E)


def attention_weights(q: Tensor, k: Tensor, at: At, mask: Mask, bias: Bias | None = None, scale: float = 1.0) -> Tensor:
    """(B, H, L, S): how much each query takes from each key."""
    wide = torch.promote_types(q.dtype, torch.float32)
    with without_autocast(q.device):
        scores = q.to(wide) @ per_head(k, q).to(wide).transpose(-1, -2) * scale  # (B, H, L, S)
    if bias is not None:
        scores = scores + bias.values(at, wide)
    seen = visible(mask, at)
    if seen is None:
        return scores.softmax(-1)
    # A finite floor instead of -inf: rows without any key stay finite in both directions, and are zeroed after.
    floor = torch.finfo(wide).min
    return scores.masked_fill(~seen, floor).softmax(-1).masked_fill(~seen, 0.0)


def per_head(x: Tensor, q: Tensor) -> Tensor:
    """Grouped-query attention: each key head serves H / K query heads. (B, K, S, E) -> (B, H, S, E)"""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)
