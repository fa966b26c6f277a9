"""Attention by PyTorch's fused kernels (flash on GPUs and CPUs, memory-efficient, cuDNN): the default backend.

The kernels have no sinks. A sink is added as a key with a zero value: queries and keys get one more coordinate, which
holds the sink's score in the queries and is 1 in the sink's key, 0 in all others.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.kernels.attention.arguments import AttentionCall, ScoreOptions
from regard.kernels.attention.mask import Causal, Mask, attention_mask
from regard.layout import Bias, TokenLayout


def unsupported_reason(call: AttentionCall) -> str | None:
    return None if call.softcap is None else "sdpa has no softcap"


def slower_reason(call: AttentionCall) -> str | None:
    return None


def attend(q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, options: ScoreOptions) -> Tensor:
    groups, bias, scale, dropout = q.shape[1] // k.shape[1], options.bias, options.scale, options.dropout
    grouped: dict[str, Any] = {"enable_gqa": True} if groups > 1 else {}  # the operator takes no symbolic bool
    if layout.ordered and bias is None and options.sinks is None and type(options.mask) is Causal:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, scale=scale, **grouped)
    allowed, width = attention_mask(options.mask, layout), v.shape[-1]
    mask = allowed if bias is None else biased_mask(bias, options.mask, layout, q.dtype)
    if options.sinks is not None:
        q, k, v = with_sinks(q, k, v, options.sinks / scale)
        # The key of the sink is allowed and has no bias.
        mask = None if mask is None else F.pad(mask, (0, 1), value=mask.dtype == torch.bool)
    if q.shape[2] == 1 and groups > (1 if q.is_cuda else 3) and bias is None:
        # One query per row: the heads of a group become queries of one key head, so its keys are read once.
        # On a CPU the product of two or three heads is too thin to be faster.
        q = q.unflatten(1, (k.shape[1], groups)).squeeze(3)  # (B, K, G, E)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale)
        return zero_without_key(out.flatten(1, 2).unsqueeze(2)[..., :width], allowed, layout)  # (B, H, 1, Ev)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale, **grouped)
    return zero_without_key(out[..., :width], allowed, layout)  # (B, H, L, Ev)


def zero_without_key(out: Tensor, allowed: Tensor | None, layout: TokenLayout) -> Tensor:
    """Zeros for queries without any allowed key, for which cuDNN's kernel returns a mean of the masked values."""
    if allowed is None or (layout.key_valid is None and layout.key_visible is None) or not out.is_cuda:
        return out
    return out.masked_fill(~allowed.any(-1, keepdim=True), 0.0)


def biased_mask(bias: Bias, mask: Mask, layout: TokenLayout, dtype: torch.dtype) -> Tensor:
    """(B, H, L, S) the bias, -inf where the mask forbids the key; computed once for all layers if it has no weights."""
    if bias.learned:
        return masked_bias(layout, bias, mask, dtype)
    return layout.derived(masked_bias, bias, mask, dtype)


def masked_bias(layout: TokenLayout, bias: Bias, mask: Mask, dtype: torch.dtype) -> Tensor:
    values, allowed = bias.values(layout, dtype), attention_mask(mask, layout)
    return values if allowed is None else torch.where(allowed, values, float("-inf"))


def with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v with one more coordinate, k and v with one more key. Equal widths of k and v are faster."""
    scores = sinks.to(q.dtype).view(1, -1, 1, 1).expand(*q.shape[:3], 1)
    unit = F.one_hot(torch.tensor(q.shape[-1], device=q.device), q.shape[-1] + 1).to(k.dtype)
    k = torch.cat([F.pad(k, (0, 1)), unit.expand(*k.shape[:2], 1, -1)], 2)  # (B, K, S + 1, E + 1)
    return torch.cat([q, scores], -1), k, F.pad(v, (0, 1, 0, 1))
