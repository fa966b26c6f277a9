"""Where attention goes: its weights, recomputed from recorded queries and keys, so that any backend may run the model.

    A_h = softmax(q_h k_gᵀ / √E + bias)           (L, S) for each head, rows sum to one
    H_i = -Σ_j A_ij log A_ij                      row i's entropy: 0 if one key takes all, log S if all share alike

A head's entropy is the mean of its rows'; one that falls towards 0 in training has collapsed (Zhai et al. 2023).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.kernels.attention import reference
from regard.kernels.attention.bias import Bias
from regard.layout import TokenLayout
from regard.lens.recording import record
from regard.models.decoder import DecoderModule
from regard.parts.attention import AttentionModule
from regard.parts.cross_attention import CrossAttentionModule
from regard.parts.latent_attention import LatentAttentionModule

Comparing = AttentionModule | LatentAttentionModule  # what has queries and keys of one text, and its scores


def attention_maps(
    model: DecoderModule, ids: Sequence[int] | Tensor, layout: TokenLayout | None = None, layer: int | None = None
) -> list[Tensor | None]:
    """For each layer, or for this one only, the weights (H, L, L) of one text (L,); None where it has no attention.

    `layout` (one row) may say more of the text, for example where its documents begin.
    """
    tokens = torch.as_tensor(ids, dtype=torch.long, device=model.embedding.weight.device)
    if tokens.dim() != 1:
        raise ValueError(f"attention maps are of one text (L,), found ids of shape {tuple(tokens.shape)}; give one row")
    tokens = tokens.unsqueeze(0)  # (1, L)
    layout = TokenLayout.whole(*tokens.shape, tokens.device) if layout is None else layout
    layers = attentions(model)
    layers = layers if layer is None else [layers[layer]]
    taps = [f"{path}.{tap}" for layer in layers for path in layer for tap in ("q", "k")]
    with torch.no_grad(), record(model, taps) as seen:
        model.hidden(tokens, layout)
    layout = model.position.share(layout)
    maps = [
        [attention_weights(module, seen[f"{path}.q"], seen[f"{path}.k"], layout)[0] for path, module in layer.items()]
        for layer in layers
    ]
    return [torch.cat(heads) if heads else None for heads in maps]


def attention_heads(model: DecoderModule) -> tuple[int, ...]:
    """How many maps each layer has, 0 for a layer without attention."""
    return tuple(sum(module.heads for module in layer.values()) for layer in attentions(model))


def attentions(model: DecoderModule) -> list[dict[str, Comparing]]:
    """For each layer its attention modules by their names in the model; what looks at a source is none of them."""
    return [
        {
            path: module
            for path, module in block.named_modules(prefix=f"stack.blocks.{i}")
            if isinstance(module, Comparing) and not isinstance(module, CrossAttentionModule)
        }
        for i, block in enumerate(model.stack.blocks)
    ]


def attention_weights(
    attention: Comparing,
    q: Tensor,
    k: Tensor,
    layout: TokenLayout,
    rows: slice = slice(None),
    heads: slice = slice(None),
) -> Tensor:
    """(B, heads, rows, S) of this attention, from the q and k of its taps and the `layout` that it ran with.

    Only the rows and heads asked for are computed: a long text has L² weights a head.
    """
    scores = attention.scores(layout)
    some = replace(
        scores,
        bias=None if scores.bias is None else SomeHeads(scores.bias, heads),
        sinks=None if scores.sinks is None else scores.sinks[heads],
    )
    return reference.attention_weights(
        q[:, heads, rows], reference.per_head(k, q)[:, heads], layout.queries(rows), some
    )


@dataclass(frozen=True, eq=False)
class SomeHeads:
    """A bias for some of the heads that it was made for."""

    bias: Bias
    heads: slice

    def values(self, layout: TokenLayout, dtype: torch.dtype) -> Tensor:
        found = self.bias.values(layout, dtype)
        return found if found.shape[1] == 1 else found[:, self.heads]  # 1: the same for all


def row_entropy(weights: Tensor) -> Tensor:
    """(…, L, S) -> (…, L)"""
    return torch.special.entr(weights).sum(-1)


def entropy(weights: Tensor) -> Tensor:
    """(…, H, L, S) -> (…, H), in nats: the mean of each head's rows."""
    return row_entropy(weights).mean(-1)
