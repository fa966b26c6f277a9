"""Granite (IBM 2024): Llama with constant factors on embeddings, scores, residual branches and logits."""

from dataclasses import replace
from typing import Any

from regard.families.common import decoder
from regard.families.common.config_reader import Config
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.models.decoder import Decoder
from regard.parts.attention import Attention
from regard.parts.feedforward import Gated
from regard.weights.table import Table


def spec(config: dict[str, Any]) -> Decoder:
    hf_config = Config("granite", config)
    attention = replace(decoder.read_attention(hf_config), scale=hf_config.number("attention_multiplier", 1.0))
    block = decoder.pre_norm_block(
        hf_config, attention, decoder.read_gated(hf_config, hf_config.flag("mlp_bias", False))
    )
    return replace(
        decoder.read_decoder(hf_config, replace(block, share=hf_config.number("residual_multiplier", 1.0))),
        embedding_scale=hf_config.number("embedding_multiplier", 1.0),
        logit_scale=1 / hf_config.positive("logits_scaling", 1.0),
    )


def config(model: Decoder) -> dict[str, Any]:
    attention, feedforward = bodies(model.blocks[0], Attention, Gated)
    settings = decoder.llama_config("granite", "GraniteForCausalLM", model, attention, feedforward)
    settings |= {
        "attention_bias": attention.bias,
        "mlp_bias": feedforward.bias,
        "attention_multiplier": settings["head_dim"] ** -0.5 if attention.scale is None else attention.scale,
        "residual_multiplier": model.blocks[0].share,
        "embedding_multiplier": model.embedding_scale,
        "logits_scaling": 1 / (model.logit_scale or 1.0),
    }
    return check_roundtrip("granite", model, settings, spec)


def table(model: Decoder) -> Table:
    return decoder.LLAMA_TABLE
