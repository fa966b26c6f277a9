"""Mistral (Jiang et al. 2023): Llama with grouped-query attention and windows in all layers; later models have none."""

from dataclasses import replace
from typing import Any

from regard.families.common import decoder
from regard.families.common.config_reader import Config
from regard.families.common.layer_types import SLIDING, attention_by_type, window_size
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.models.decoder import Decoder
from regard.parts.attention import Attention
from regard.parts.feedforward import Gated
from regard.weights.table import Table

DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}


def spec(config: dict[str, Any]) -> Decoder:
    hf_config = Config("mistral", DEFAULTS | config)
    attention = read_windowed(hf_config, replace(decoder.read_attention(hf_config), bias=False))
    return decoder.read_decoder(hf_config, decoder.pre_norm_block(hf_config, attention, decoder.read_gated(hf_config)))


def read_windowed(hf_config: Config, attention: Attention) -> Attention:
    """The attention with the config's window, if it has one."""
    return attention_by_type(hf_config, attention).get(SLIDING, attention)


def config(model: Decoder) -> dict[str, Any]:
    attention, feedforward = bodies(model.blocks[0], Attention, Gated)
    settings = decoder.llama_config("mistral", "MistralForCausalLM", model, attention, feedforward)
    return check_roundtrip("mistral", model, settings | {"sliding_window": window_size([attention])}, spec)


def table(model: Decoder) -> Table:
    return decoder.LLAMA_TABLE
