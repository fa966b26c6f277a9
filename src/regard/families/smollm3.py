"""SmolLM3 (Bakouch et al. 2025): Llama with every fourth layer without positions; these layers may have a window."""

from dataclasses import replace
from itertools import cycle
from typing import Any

from regard.families.common import decoder
from regard.families.common.config_reader import Config
from regard.families.common.layer_types import FULL, SLIDING, layer_interval, layer_list, tile_blocks
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.families.qwen2 import optional_window_config, read_optional_windows
from regard.models.decoder import Decoder
from regard.parts.attention import Attention
from regard.parts.feedforward import Gated
from regard.parts.position.base import NoPosition
from regard.weights.table import Table

DEFAULTS = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rope_theta": 2e6,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
}


def spec(config: dict[str, Any]) -> Decoder:
    hf_config = Config("smollm3", DEFAULTS | config)
    feedforward = decoder.read_gated(hf_config, hf_config.flag("mlp_bias", False))
    attentions = read_optional_windows(hf_config, decoder.read_attention(hf_config))
    blocks = {}
    for kind, attention in attentions.items():
        blocks[kind, 1] = decoder.pre_norm_block(hf_config, attention, feedforward)
        blocks[kind, 0] = decoder.pre_norm_block(hf_config, replace(attention, position=NoPosition()), feedforward)
    default_rope = (1,) * (layer_interval(hf_config, "no_rope_layer_interval", 4) - 1) + (0,)
    rope = layer_list(hf_config, "no_rope_layers", int, default_rope)  # 1: the layer has RoPE
    default_types = tuple(SLIDING if SLIDING in attentions and not rotated else FULL for rotated in rope)
    kinds = layer_list(hf_config, "layer_types", str, default_types)
    return decoder.read_decoder(hf_config, tile_blocks(hf_config, blocks, tuple(zip(kinds, cycle(rope), strict=False))))


def config(model: Decoder) -> dict[str, Any]:
    pairs = [bodies(block, Attention, Gated) for block in model.blocks]
    attentions = [attention for attention, _ in pairs]
    attention, feedforward = next((pair for pair in pairs if pair[0].position != NoPosition()), pairs[0])
    settings = decoder.llama_config("smollm3", "SmolLM3ForCausalLM", model, attention, feedforward) | {
        "attention_bias": attention.bias,
        "mlp_bias": feedforward.bias,
        "no_rope_layers": [int(attention.position != NoPosition()) for attention in attentions],
        **optional_window_config(attentions),
    }
    return check_roundtrip("smollm3", model, settings, spec)


def table(model: Decoder) -> Table:
    return decoder.LLAMA_TABLE
