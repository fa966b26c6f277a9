"""The logit lens: the head of the model applied to the residual stream between its layers.

    logits_l = W_head norm(x_l)          x_l: the residual stream after block l          nostalgebraist 2020

It shows after which layer the model's prediction is there. Early layers write in directions that the head does not
read, so their logits say little.
"""

import torch
from torch import Tensor, nn

from regard.lens.hooks import record
from regard.lens.inputs import IdSequence, rows_of, single_stream
from regard.models.decoder import DecoderModule
from regard.models.encoder import EncoderModule
from regard.models.heads import MaskedLMModule
from regard.parts.input import whole_layout


@torch.no_grad()
def logit_lens(model: nn.Module, ids: IdSequence, positions: slice = slice(None)) -> dict[str, Tensor]:
    """Logits (B, L, V) at the input of the stack and after each block, by name; the last are the model's own.

    `ids` is (L,) or (B, L). positions: only these; all logits of a large model need much memory.
    """
    names = single_stream(model)
    (tokens,) = rows_of(model, ids)
    with record(model, names) as recorded:
        model(tokens)
    return {name: unembed(model, recorded[name][:, positions], tokens[:, positions]) for name in names}


def unembed(model: nn.Module, x: Tensor, tokens: Tensor) -> Tensor:
    """The logits of a residual stream (B, L, D)."""
    if isinstance(model, DecoderModule):
        return model.logits(model.final_norm(x))
    if isinstance(model, EncoderModule) and isinstance(model.head, MaskedLMModule):
        return model.head(model.norm(x), whole_layout(tokens))
    raise ValueError(
        f"{type(model).__name__} has no head for tokens; give a decoder, or an encoder with a MaskedLM head"
    )
