"""Attention as its equation, in plain tensor algebra: the oracle of every other backend.

    out = softmax(q kᵀ · scale + bias) v      over the keys that the query sees (scores.py has the whole of it)

Sums and softmax run in at least float32. A query that sees no key gives zeros, with zero gradients.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.kernels.attention.bias import Bias
from regard.kernels.attention.mask import visible
from regard.kernels.attention.score_options import ScoreOptions
from regard.kernels.autocast import without_autocast
from regard.layout import TokenLayout


def refuses(q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, scores: ScoreOptions) -> str | None:
    return None


def slower(q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, scores: ScoreOptions) -> str | None:
    return None


def attend(q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, scores: ScoreOptions) -> Tensor:
    weights = F.dropout(attention_weights(q, k, layout, scores), scores.dropout)  # (B, H, L, S)
    with without_autocast(q.device):
        return (weights @ per_head(v, q).to(weights.dtype)).to(q.dtype)  # (B, H, L, E)


def attention_weights(q: Tensor, k: Tensor, layout: TokenLayout, scores: ScoreOptions) -> Tensor:
    """(B, H, L, S): how much each query takes from each key."""
    wide = torch.promote_types(q.dtype, torch.float32)
    with without_autocast(q.device):
        s = q.to(wide) @ per_head(k, q).to(wide).transpose(-1, -2) * scores.scale  # (B, H, L, S)
    if scores.softcap is not None:
        s = scores.softcap * torch.tanh(s / scores.softcap)
    if scores.bias is not None:
        s = s + scores.bias.values(layout, wide)
    return normalize(s, visible(scores.mask, layout), scores.sinks)


def weights_of_heads(q: Tensor, k: Tensor, layout: TokenLayout, scores: ScoreOptions, heads: slice) -> Tensor:
    """(B, heads, L, S): the attention weights of some heads, without computing the others."""
    bias = None if scores.bias is None else HeadsBias(scores.bias, heads)
    sinks = None if scores.sinks is None else scores.sinks[heads]
    scores = replace(scores, bias=bias, sinks=sinks)
    return attention_weights(q[:, heads], per_head(k, q)[:, heads], layout, scores)


@dataclass(frozen=True, eq=False)
class HeadsBias(Bias):
    """The bias of some heads."""

    bias: Bias
    heads: slice

    def values(self, layout: TokenLayout, dtype: torch.dtype) -> Tensor:
        values = self.bias.values(layout, dtype)
        return values if values.shape[1] == 1 else values[:, self.heads]  # 1: the same for all heads


def normalize(s: Tensor, seen: Tensor | None, sinks: Tensor | None = None) -> Tensor:
    """Softmax of (B, H, L, S) scores over the keys that are seen; a sink takes its share and gives nothing."""
    if seen is not None:
        # A finite floor instead of -inf: rows without any key stay finite in both directions, and are zeroed after.
        s = s.masked_fill(~seen, torch.finfo(s.dtype).min)
    if sinks is None:
        weights = s.softmax(-1)
    else:
        column = sinks.to(s.dtype).view(1, -1, 1, 1).expand(*s.shape[:-1], 1)
        weights = torch.cat([s, column], -1).softmax(-1)[..., :-1]
    return weights if seen is None else weights.masked_fill(~seen, 0.0)


def per_head(x: Tensor, q: Tensor) -> Tensor:
    """Grouped-query attention: each key head serves H / K query heads. (B, K, S, E) -> (B, H, S, E)"""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)
