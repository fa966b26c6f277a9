"""A new head for a model that is trained further.

An encoder keeps everything but its head. A decoder becomes an encoder with causal masks (models/causal_encoder.py): the
same embeddings, blocks and norm, with a head that pools the last token, which attends to all others, instead of the
head for the next token. A classification head without further layers is then the one of `transformers`: it has no bias,
and the last token is the last one that is not padding.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from regard.models.base import Model
from regard.models.causal_encoder import EMBEDDINGS, causal_encoder
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.spec import SpecError, require

POOLED = ("classification", "pooled")  # heads with a `pool`


def with_new_head(model: Model, head: Mapping[str, Any], pad: int | None = None) -> dict[str, Any]:
    """The table of the model's spec with another head; `pad` is the tokenizer's id of padding."""
    if isinstance(model, Encoder):
        return {**model.to_dict(), "head": dict(head)}
    if not isinstance(model, Decoder):
        raise SpecError(f"[head] replaces the head of an encoder or a decoder, and this model is a {model.kind}")
    table = dict(head)
    if table.get("kind") in POOLED:
        pool = table.setdefault("pool", "last")
        require(
            pool not in ("cls", "cls_mean"),
            f"head.pool={pool!r}: the first token of a decoder attends to itself only; set it to last or mean",
        )
    if table.get("kind") == "classification" and table["pool"] == "last":
        table = {"bias": False, **({} if pad is None else {"pad": pad}), **table}
    return {**causal_encoder(model).to_dict(), "head": table}


@torch.no_grad()
def with_weights_of(source: nn.Module, model: nn.Module) -> nn.Module:
    """The model with the weights of the source, except those of its head."""
    names = EMBEDDINGS if isinstance(source.spec, Decoder) else {}
    weights = {
        names.get(name, name): parameter
        for name, parameter in source.named_parameters()
        if not name.startswith(("head.", "ahead."))
    }
    parameters = dict(model.named_parameters())
    assert weights.keys() <= parameters.keys(), f"{min(weights.keys() - parameters.keys())} is in the source only"
    for name, weight in weights.items():
        parameters[name].copy_(weight)
    return model
