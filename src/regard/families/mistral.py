"""Mistral (Jiang et al. 2023): Llama with grouped queries and a window in every layer; later ones have none again."""

from dataclasses import replace
from typing import Any

from regard.families.common.config_reader import Config
from regard.families.common.layer_types import SLIDING, by_window, window
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.families.llama import TABLE, attention, decoder, feedforward, pre, written
from regard.models.decoder import Decoder
from regard.parts.attention import Attention
from regard.parts.feedforward import SwiGLU
from regard.weights.table import Table

DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}


def spec(config: dict[str, Any]) -> Decoder:
    theirs = Config("mistral", DEFAULTS | config)
    mixer = replace(attention(theirs), bias=False)
    mixer = by_window(theirs, mixer).get(SLIDING, mixer)
    return decoder(theirs, pre(theirs, mixer, feedforward(theirs)))


def config(model: Decoder) -> dict[str, Any]:
    mixer, inner = bodies(model.blocks[0], Attention, SwiGLU)
    own = {"sliding_window": window([mixer])}
    return check_roundtrip("mistral", model, written("MistralForCausalLM", "mistral", model, mixer, inner) | own, spec)


def table(model: Decoder) -> Table:
    return TABLE
