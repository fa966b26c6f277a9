"""Attention by PyTorch's fused kernels (flash on GPUs and CPUs, memory-efficient, cuDNN): the everyday backend."""

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.at import At
from regard.kernels.attention.bias import Bias
from regard.kernels.attention.mask import Causal, Mask, visible


def attend(q: Tensor, k: Tensor, v: Tensor, at: At, mask: Mask, bias: Bias | None = None, scale: float = 1.0) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    if at.ordered and bias is None and type(mask) is Causal:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=groups > 1)
    seen = visible(mask, at)
    extra = seen if bias is None else additive(bias.values(at, q.dtype), seen)
    if q.shape[2] == 1 and groups > 1 and bias is None:
        # One query a row: the heads of a group are queries of one key head, so keys are read once, not once a head.
        q = q.unflatten(1, (k.shape[1], groups)).squeeze(3)  # (B, K, G, E)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=extra, scale=scale)
        return out.flatten(1, 2).unsqueeze(2)  # (B, H, 1, E)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=extra, scale=scale, enable_gqa=groups > 1)


def additive(bias: Tensor, seen: Tensor | None) -> Tensor:
    return bias if seen is None else torch.where(seen, bias, float("-inf"))
