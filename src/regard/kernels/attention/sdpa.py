"""Attention by PyTorch's fused kernels (flash on GPUs and CPUs, memory-efficient, cuDNN): the everyday backend.

The kernels know no sinks, but keys: a sink is a key that meets one more coordinate of the queries, where each head has
its sink's score, and whose value is zero.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.kernels.attention.mask import Causal, visible
from regard.kernels.attention.score_options import ScoreOptions
from regard.layout import TokenLayout


def refuses(q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, scores: ScoreOptions) -> str | None:
    return None if scores.softcap is None else "sdpa cannot cap scores"


def slower(q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, scores: ScoreOptions) -> str | None:
    return None


def attend(q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, scores: ScoreOptions) -> Tensor:
    groups, bias, scale, dropout = q.shape[1] // k.shape[1], scores.bias, scores.scale, scores.dropout
    if layout.ordered and bias is None and scores.sinks is None and type(scores.mask) is Causal:
        return F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=True, scale=scale, enable_gqa=groups > 1
        )
    seen, width = visible(scores.mask, layout), v.shape[-1]
    extra = seen if bias is None else additive(bias.values(layout, q.dtype), seen)
    if scores.sinks is not None:
        q, k, v = with_sinks(q, k, v, scores.sinks / scale)
        extra = None if extra is None else F.pad(extra, (0, 1), value=extra.dtype == torch.bool)  # seen, without bias
    if q.shape[2] == 1 and groups > (1 if q.is_cuda else 3) and bias is None:
        # One query a row: the heads of a group are queries of one key head, so keys are read once, not once a head.
        # On a CPU the product of two or three heads is too thin to be faster.
        q = q.unflatten(1, (k.shape[1], groups)).squeeze(3)  # (B, K, G, E)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=extra, dropout_p=dropout, scale=scale)
        return without_blind(out.flatten(1, 2).unsqueeze(2)[..., :width], seen, layout)  # (B, H, 1, Ev)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=extra, dropout_p=dropout, scale=scale, enable_gqa=groups > 1
    )
    return without_blind(out[..., :width], seen, layout)  # (B, H, L, Ev)


def without_blind(out: Tensor, seen: Tensor | None, layout: TokenLayout) -> Tensor:
    """Zeros for queries that see no key: cuDNN's kernel, on GPUs, gives them a mean of what they do not see."""
    if seen is None or layout.key_valid is None or not out.is_cuda:
        return out
    return out.masked_fill(~seen.any(-1, keepdim=True), 0.0)


def additive(bias: Tensor, seen: Tensor | None) -> Tensor:
    return bias if seen is None else torch.where(seen, bias, float("-inf"))


def with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q and k with one more coordinate, k and v with one more key; v as wide as k where it was, as kernels like it."""
    shares = sinks.to(q.dtype).view(1, -1, 1, 1).expand(*q.shape[:3], 1)
    unit = F.one_hot(torch.tensor(q.shape[-1], device=q.device), q.shape[-1] + 1).to(k.dtype)
    k = torch.cat([F.pad(k, (0, 1)), unit.expand(*k.shape[:2], 1, -1)], 2)  # (B, K, S + 1, E + 1)
    return torch.cat([q, shares], -1), k, F.pad(v, (0, 1, 0, 1))
