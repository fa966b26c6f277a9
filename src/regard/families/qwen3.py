"""Qwen3 (Yang et al. 2025): Qwen2 with norms of queries and keys per head instead of biases."""

from dataclasses import replace
from typing import Any

from regard.families import qwen2
from regard.families.common import decoder
from regard.families.common.config_reader import Config
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.models.decoder import Decoder
from regard.parts.attention import Attention
from regard.parts.feedforward import Gated
from regard.weights.table import Table

DEFAULTS = qwen2.DEFAULTS | {"head_dim": 128}
TABLE = decoder.make_table(*decoder.PROJECTIONS, *decoder.NORMS, *decoder.QK_NORMS, prefix="model.")


def spec(config: dict[str, Any]) -> Decoder:
    hf_config = Config("qwen3", DEFAULTS | config)
    attention = replace(decoder.read_attention(hf_config), qk_norm=decoder.read_rms_norm(hf_config))
    return decoder.read_decoder(hf_config, qwen2.read_layers(hf_config, attention))


def config(model: Decoder) -> dict[str, Any]:
    attention, _ = bodies(model.blocks[0], Attention, Gated)
    settings = qwen2.common_config("qwen3", "Qwen3ForCausalLM", model) | {"attention_bias": attention.bias}
    return check_roundtrip("qwen3", model, settings, spec)


def table(model: Decoder) -> Table:
    return TABLE
