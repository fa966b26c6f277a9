"""Granite (IBM 2024): Llama with constants on the embeddings, the scores, the sublayers' outputs and the logits."""

from dataclasses import replace
from typing import Any

from regard.families.common.config_reader import Config
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.families.llama import TABLE, attention, decoder, feedforward, pre, written
from regard.models.decoder import Decoder
from regard.parts.attention import Attention
from regard.parts.feedforward import SwiGLU
from regard.weights.table import Table


def spec(config: dict[str, Any]) -> Decoder:
    theirs = Config("granite", config)
    mixer = replace(attention(theirs), scale=theirs.number("attention_multiplier", 1.0))
    block = pre(theirs, mixer, feedforward(theirs, theirs.flag("mlp_bias", False)))
    return replace(
        decoder(theirs, replace(block, share=theirs.number("residual_multiplier", 1.0))),
        embedding_scale=theirs.number("embedding_multiplier", 1.0),
        logit_scale=1 / theirs.positive("logits_scaling", 1.0),
    )


def config(model: Decoder) -> dict[str, Any]:
    mixer, inner = bodies(model.blocks[0], Attention, SwiGLU)
    own = {
        "attention_bias": mixer.bias,
        "mlp_bias": inner.bias,
        "attention_multiplier": mixer.sizes(model.width)[2] ** -0.5 if mixer.scale is None else mixer.scale,
        "residual_multiplier": model.blocks[0].share,
        "embedding_multiplier": model.embedding_scale,
        "logits_scaling": 1 / (model.logit_scale or 1.0),
    }
    return check_roundtrip("granite", model, written("GraniteForCausalLM", "granite", model, mixer, inner) | own, spec)


def table(model: Decoder) -> Table:
    return TABLE
