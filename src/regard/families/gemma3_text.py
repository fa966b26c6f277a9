"""Gemma 3, the text model (Gemma team 2025): Gemma 2 with norms of queries and keys instead of softcapped scores.

Five layers with a window precede each full-attention layer. Each layer type has its own rope: `rope_parameters`
per type (transformers 5), or `rope_local_base_freq` for windows, `rope_theta` and `rope_scaling` for the others (4).
"""

from dataclasses import replace
from typing import Any

from regard.families.common import decoder
from regard.families.common.config_reader import Config
from regard.families.common.layer_types import FULL, SLIDING, attention_by_type, sliding_then_full
from regard.families.common.rope_config import read_rope_settings, rope_parameters
from regard.families.common.roundtrip import check_roundtrip
from regard.families.gemma2 import DEFAULTS as GEMMA2_DEFAULTS
from regard.families.gemma2 import NORMS, gemma_config, read_gemma, read_norm, read_scale
from regard.models.decoder import Decoder
from regard.weights.table import Table

DEFAULTS = GEMMA2_DEFAULTS | {
    "max_position_embeddings": 131072,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
TABLE = decoder.make_table(*decoder.PROJECTIONS, *NORMS, *decoder.QK_NORMS)


def spec(config: dict[str, Any]) -> Decoder:
    hf_config = Config("gemma3_text", DEFAULTS | config)
    hf_config.accept_only("attn_logit_softcapping", None)  # transformers reads it and does not use it
    by_type = hf_config.nested("rope_parameters")
    settings = {**by_type.nested(FULL).values, **hf_config.nested("rope_scaling").values}
    full = read_rope_settings(Config("gemma3_text: rope", settings), hf_config, hf_config.number("rope_theta", 1e6))
    local = read_rope_settings(by_type.nested(SLIDING), hf_config, hf_config.number("rope_local_base_freq", 1e4))
    attention = replace(
        decoder.read_attention(hf_config, full), scale=read_scale(hf_config), qk_norm=read_norm(hf_config)
    )
    attentions = attention_by_type(hf_config, attention)
    if SLIDING in attentions:
        attentions[SLIDING] = replace(attentions[SLIDING], position=local)
    return read_gemma(hf_config, attentions, sliding_then_full(hf_config, "sliding_window_pattern", 6))


def config(model: Decoder) -> dict[str, Any]:
    attentions, settings = gemma_config("gemma3_text", "Gemma3ForCausalLM", model)
    by_type = dict(zip(settings["layer_types"], (rope_parameters(a.position) for a in attentions), strict=True))
    return check_roundtrip("gemma3_text", model, settings | {"rope_parameters": by_type}, spec)


def table(model: Decoder) -> Table:
    return TABLE
