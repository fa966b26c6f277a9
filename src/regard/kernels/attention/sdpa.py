"""Attention by PyTorch's fused kernels (flash on GPUs and CPUs, memory-efficient, cuDNN): the everyday backend."""

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.at import At
from regard.kernels.attention.mask import Causal, visible
from regard.kernels.attention.scores import Scores


def refuses(q: Tensor, k: Tensor, v: Tensor, at: At, scores: Scores) -> str | None:
    if scores.softcap is not None:
        return "sdpa cannot cap scores"
    if scores.sinks is not None:
        return "sdpa has no sinks"
    return None


def attend(q: Tensor, k: Tensor, v: Tensor, at: At, scores: Scores) -> Tensor:
    groups, bias, scale, dropout = q.shape[1] // k.shape[1], scores.bias, scores.scale, scores.dropout
    if at.ordered and bias is None and type(scores.mask) is Causal:
        return F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=True, scale=scale, enable_gqa=groups > 1
        )
    seen = visible(scores.mask, at)
    extra = seen if bias is None else additive(bias.values(at, q.dtype), seen)
    if q.shape[2] == 1 and groups > 1 and bias is None:
        # One query a row: the heads of a group are queries of one key head, so keys are read once, not once a head.
        q = q.unflatten(1, (k.shape[1], groups)).squeeze(3)  # (B, K, G, E)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=extra, dropout_p=dropout, scale=scale)
        return out.flatten(1, 2).unsqueeze(2)  # (B, H, 1, E)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=extra, dropout_p=dropout, scale=scale, enable_gqa=groups > 1
    )


def additive(bias: Tensor, seen: Tensor | None) -> Tensor:
    return bias if seen is None else torch.where(seen, bias, float("-inf"))
