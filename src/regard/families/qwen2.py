"""Qwen2 (Yang et al. 2024): Llama with biases on queries, keys and values, and windows in the later layers."""

from dataclasses import replace
from typing import Any

from regard.families.common import decoder
from regard.families.common.config_reader import Config
from regard.families.common.layer_types import FULL, SLIDING, attention_by_type, layer_list, tile_blocks, window_config
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.feedforward import Gated
from regard.weights.table import Table

DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,  # the number of layers without a window, which come first
}


def spec(config: dict[str, Any]) -> Decoder:
    hf_config = Config("qwen2", DEFAULTS | config)
    attention = replace(decoder.read_attention(hf_config), bias=True, out_bias=False)
    return decoder.read_decoder(hf_config, read_layers(hf_config, attention))


def config(model: Decoder) -> dict[str, Any]:
    return check_roundtrip("qwen2", model, common_config("qwen2", "Qwen2ForCausalLM", model), spec)


def table(model: Decoder) -> Table:
    return decoder.LLAMA_TABLE


def read_optional_windows(hf_config: Config, attention: Attention) -> dict[str, Attention]:
    """The attention of each layer type; windows only with `use_sliding_window`."""
    return attention_by_type(hf_config, attention) if hf_config.flag("use_sliding_window") else {FULL: attention}


def read_layers(hf_config: Config, attention: Attention) -> tuple[Repeat, ...]:
    feedforward, attentions = decoder.read_gated(hf_config), read_optional_windows(hf_config, attention)
    blocks = {kind: decoder.pre_norm_block(hf_config, attention, feedforward) for kind, attention in attentions.items()}
    if kinds := layer_list(hf_config, "layer_types", str, ()):
        return tile_blocks(hf_config, blocks, kinds)
    depth = hf_config.integer("num_hidden_layers")
    full = min(max(hf_config.integer("max_window_layers"), 0), depth) if SLIDING in blocks else depth
    runs = {FULL: full, SLIDING: depth - full}
    return tuple(Repeat((blocks[kind],), times) for kind, times in runs.items() if times)


def common_config(model_type: str, architecture: str, model: Decoder) -> dict[str, Any]:
    """The keys that Qwen2 and Qwen3 have."""
    pairs = [bodies(block, Attention, Gated) for block in model.blocks]
    windows = optional_window_config([attention for attention, _ in pairs])
    return decoder.llama_config(model_type, architecture, model, *pairs[0]) | windows


def optional_window_config(attentions: list[Attention]) -> dict[str, Any]:
    settings = window_config(attentions)
    return {"use_sliding_window": settings["sliding_window"] is not None, **settings}
