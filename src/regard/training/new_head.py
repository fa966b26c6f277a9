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

from regard.checkpoint.stored_parts import tied_names
from regard.models.base import Model, build_on_meta
from regard.models.causal_encoder import EMBEDDINGS, causal_encoder
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.value_head import NAME as VALUE_HEAD
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
    weights, parameters = weights_without_head(source), dict(model.named_parameters())
    assert weights.keys() <= parameters.keys(), f"{min(weights.keys() - parameters.keys())} is in the source only"
    for name, weight in weights.items():
        parameters[name].copy_(weight)
    return model


def weights_without_head(source: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a model by the names that they have in a model with a new head."""
    names = EMBEDDINGS if isinstance(source.spec, Decoder) else {}
    return {
        names.get(name, name): parameter
        for name, parameter in source.named_parameters()
        if not name.startswith(("head.", "ahead.", f"{VALUE_HEAD}."))
    }


def replace_head(source: nn.Module, spec: Model) -> nn.Module:
    """The model of this spec with the parameters of the source themselves, and a head whose weights are zero."""
    model, weights, like = build_on_meta(spec), weights_without_head(source), next(source.parameters())
    new, parameters = head_parameters(model), dict(model.named_parameters())
    other = [n for n, p in parameters.items() if n not in new and (n not in weights or weights[n].shape != p.shape)]
    require(not other, f"{(*other, '')[0]} is not in the model that gets a new head; use the model of this spec")
    tensors = {
        name: nn.Parameter(like.new_zeros(parameter.shape)) if name in new else weights[name]
        for name, parameter in parameters.items()
    }
    model.load_state_dict(tensors | {name: tensors[first] for name, first in tied_names(model)}, assign=True)
    return model.train(source.training)


def head_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a model's head that are not tied to others."""
    return {name: parameter for name, parameter in model.named_parameters() if name.startswith("head.")}
