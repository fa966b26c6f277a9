"""Attention as its equation, in plain tensor algebra: the reference for every other backend.

    out = softmax(q kᵀ · scale + bias) v      over the keys that the mask allows (arguments.py: cap, sinks)

Sums and softmax run in at least float32. The output of a query without any allowed key is zero, and so are its
gradients.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.kernels.attention.arguments import AttentionCall, ScoreOptions
from regard.kernels.attention.mask import attention_mask
from regard.kernels.autocast import without_autocast
from regard.layout import Bias, TokenLayout


def unsupported_reason(call: AttentionCall) -> str | None:
    return None


def slower_reason(call: AttentionCall) -> str | None:
    return None


TensorFunction = Callable[[Tensor], Tensor]  # reads a tensor, and returns it or its replacement


def attend(q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, options: ScoreOptions) -> Tensor:
    return weighted_sum(attention_weights(q, k, layout, options), q, v, options)


def attend_edited(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: TokenLayout,
    options: ScoreOptions,
    scores: TensorFunction,
    pattern: TensorFunction,
) -> Tensor:
    """`attend`, in which the functions read, and may replace, the masked scores and the weights, (B, H, L, S) each."""
    s = attention_scores(q, k, layout, options)
    return weighted_sum(
        normalize_edited(s, attended_keys(s, layout, options), scores, pattern, options.sinks), q, v, options
    )


def weighted_sum(weights: Tensor, q: Tensor, v: Tensor, options: ScoreOptions) -> Tensor:
    """(B, H, L, E)"""
    weights = F.dropout(weights, options.dropout)
    with without_autocast(q.device):
        return (weights @ per_head(v, q).to(weights.dtype)).to(q.dtype)


def attention_weights(q: Tensor, k: Tensor, layout: TokenLayout, options: ScoreOptions) -> Tensor:
    """(B, H, L, S)"""
    s = attention_scores(q, k, layout, options)
    return normalize(s, attended_keys(s, layout, options), options.sinks)


def attended_keys(s: Tensor, layout: TokenLayout, options: ScoreOptions) -> Tensor | None:
    """(B, 1, L, S), or (B, H, L, S) if a store chooses among the keys by their scores; None if all are allowed."""
    allowed, select = attention_mask(options.mask, layout), layout.key_select
    return allowed if select is None else select(s, allowed, options.sinks)


def attention_scores(q: Tensor, k: Tensor, layout: TokenLayout, options: ScoreOptions) -> Tensor:
    """(B, H, L, S), before the mask"""
    wide = torch.promote_types(q.dtype, torch.float32)
    with without_autocast(q.device):
        s = q.to(wide) @ per_head(k, q).to(wide).transpose(-1, -2) * options.scale  # (B, H, L, S)
    if options.softcap is not None:
        s = options.softcap * torch.tanh(s / options.softcap)
    if options.bias is not None:
        s = s + options.bias.values(layout, wide)
    return s


def weights_of_heads(q: Tensor, k: Tensor, layout: TokenLayout, options: ScoreOptions, heads: slice) -> Tensor:
    """(B, heads, L, S): the attention weights of some heads, without computing the others."""
    bias = None if options.bias is None else HeadsBias(options.bias, heads)
    sinks = None if options.sinks is None else options.sinks[heads]
    options = replace(options, bias=bias, sinks=sinks)
    return attention_weights(q[:, heads], per_head(k, q)[:, heads], layout, options)


@dataclass(frozen=True, eq=False)
class HeadsBias(Bias):
    """The bias of some heads."""

    bias: Bias
    heads: slice

    def values(self, layout: TokenLayout, dtype: torch.dtype) -> Tensor:
        values = self.bias.values(layout, dtype)
        return values if values.shape[1] == 1 else values[:, self.heads]  # 1: the same for all heads


def normalize(s: Tensor, allowed: Tensor | None, sinks: Tensor | None = None) -> Tensor:
    """Softmax of (B, H, L, S) scores over the allowed keys; sinks (H,) are in the denominator only."""
    if allowed is not None:
        # Finite instead of -inf: rows without any key stay finite, forward and backward, and are set to zero below.
        s = s.masked_fill(~allowed, torch.finfo(s.dtype).min)
    if sinks is None:
        weights = s.softmax(-1)
    else:
        column = sinks.to(s.dtype).view(1, -1, 1, 1).expand(*s.shape[:-1], 1)
        weights = torch.cat([s, column], -1).softmax(-1)[..., :-1]
    return weights if allowed is None else weights.masked_fill(~allowed, 0.0)


def normalize_edited(
    s: Tensor, allowed: Tensor | None, scores: TensorFunction, pattern: TensorFunction, sinks: Tensor | None = None
) -> Tensor:
    """`normalize`, in which the functions may replace the scores, -inf for masked keys, and the weights."""
    s = scores(s if allowed is None else s.masked_fill(~allowed, -torch.inf))
    return pattern(normalize(s, s != -torch.inf, sinks))


def per_head(x: Tensor, q: Tensor) -> Tensor:
    """Grouped-query attention: each key head serves H / K query heads. (B, K, S, E) -> (B, H, S, E)"""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)
