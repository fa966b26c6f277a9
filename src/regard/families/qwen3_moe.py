"""Qwen3-MoE (Yang et al. 2025): Qwen3 with experts and none that all tokens pass; a window is in all layers or none."""

from dataclasses import replace
from typing import Any

from regard.families import llama, qwen2_moe
from regard.families.common.config_reader import Config
from regard.families.common.layer_types import FULL, SLIDING, by_window, window
from regard.families.common.moe import EXPERTS, sparse
from regard.families.common.roundtrip import check_roundtrip
from regard.families.llama import ENDS, IGNORED, NORMS, PROJECTIONS, QK_NORMS
from regard.families.qwen2_moe import depth, experts, layers, written
from regard.models.decoder import Decoder
from regard.parts.attention import Attention
from regard.weights.table import Table

DEFAULTS = qwen2_moe.DEFAULTS | {
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
TABLE = Table(*ENDS, *PROJECTIONS, *NORMS, *QK_NORMS, *EXPERTS, ignored=IGNORED)


def spec(config: dict[str, Any]) -> Decoder:
    theirs = Config("qwen3_moe", DEFAULTS | config)
    mixer = replace(llama.attention(theirs), qk_norm=llama.norm(theirs))
    mixers = by_window(theirs, mixer) if theirs.flag("use_sliding_window") else {FULL: mixer}
    kind = SLIDING if SLIDING in mixers else FULL
    return llama.decoder(theirs, layers(theirs, mixers, (kind,) * depth(theirs), experts(theirs)))


def config(model: Decoder) -> dict[str, Any]:
    mixer, _ = sparse(model, Attention)
    own = {
        "attention_bias": mixer.bias,
        "use_sliding_window": window([mixer]) is not None,
        "sliding_window": window([mixer]),
    }
    return check_roundtrip("qwen3_moe", model, written("Qwen3MoeForCausalLM", "qwen3_moe", model) | own, spec)


def table(model: Decoder) -> Table:
    return TABLE
