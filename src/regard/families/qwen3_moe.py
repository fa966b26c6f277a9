"""Qwen3-MoE (Yang et al. 2025): Qwen3 with routed experts and no shared one; all layers have a window, or none."""

from dataclasses import replace
from typing import Any

from regard.families import qwen2_moe
from regard.families.common import decoder
from regard.families.common.config_reader import Config
from regard.families.common.layer_types import FULL, SLIDING, window_size
from regard.families.common.moe import EXPERTS, mixer_and_experts
from regard.families.common.roundtrip import check_roundtrip
from regard.families.qwen2 import read_optional_windows
from regard.families.qwen2_moe import common_config, read_depth, read_experts, read_layers
from regard.models.decoder import Decoder
from regard.parts.attention import Attention
from regard.weights.table import Table

DEFAULTS = qwen2_moe.DEFAULTS | {
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
TABLE = decoder.make_table(*decoder.PROJECTIONS, *decoder.NORMS, *decoder.QK_NORMS, *EXPERTS)


def spec(config: dict[str, Any]) -> Decoder:
    hf_config = Config("qwen3_moe", DEFAULTS | config)
    attention = replace(decoder.read_attention(hf_config), qk_norm=decoder.read_rms_norm(hf_config))
    attentions = read_optional_windows(hf_config, attention)
    kinds = (SLIDING if SLIDING in attentions else FULL,) * read_depth(hf_config)
    return decoder.read_decoder(hf_config, read_layers(hf_config, attentions, kinds, read_experts(hf_config)))


def config(model: Decoder) -> dict[str, Any]:
    attention, _ = mixer_and_experts(model, Attention)
    window = window_size([attention])
    settings = common_config("qwen3_moe", "Qwen3MoeForCausalLM", model) | {
        "attention_bias": attention.bias,
        "use_sliding_window": window is not None,
        "sliding_window": window,
    }
    return check_roundtrip("qwen3_moe", model, settings, spec)


def table(model: Decoder) -> Table:
    return TABLE
