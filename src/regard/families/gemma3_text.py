"""Gemma 3, the text model (Gemma team 2025): Gemma 2 with a norm of queries and keys in place of capped scores.

Five layers with a window stand before each that sees all, and each kind has a rope of its own: `rope_parameters` by
kind (transformers 5), or `rope_local_base_freq` for windows, `rope_theta` and `rope_scaling` for the others (4).
"""

from dataclasses import replace
from typing import Any

from regard.families import gemma2
from regard.families.common.config_reader import Config
from regard.families.common.layer_types import FULL, SLIDING, by_window, every
from regard.families.common.rope_config import rope_of, rope_parameters
from regard.families.common.roundtrip import check_roundtrip
from regard.families.llama import ENDS, IGNORED, PROJECTIONS, QK_NORMS, attention
from regard.models.decoder import Decoder
from regard.weights.table import Table

DEFAULTS = gemma2.DEFAULTS | {
    "max_position_embeddings": 131072,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
TABLE = Table(*ENDS, *PROJECTIONS, *gemma2.NORMS, *QK_NORMS, ignored=IGNORED)


def spec(config: dict[str, Any]) -> Decoder:
    theirs = Config("gemma3_text", DEFAULTS | config)
    theirs.only("attn_logit_softcapping", None)  # which transformers reads and does not use
    kinds = theirs.table("rope_parameters")
    settings = kinds.table(FULL) if theirs.has("rope_parameters") else theirs.table("rope_scaling")
    far = rope_of(settings, theirs, theirs.number("rope_theta", 1e6))
    near = rope_of(kinds.table(SLIDING), theirs, theirs.number("rope_local_base_freq", 1e4))
    mixer = replace(gemma2.scaled(theirs, attention(theirs, far)), qk_norm=gemma2.norm(theirs))
    mixers = by_window(theirs, mixer)
    if SLIDING in mixers:
        mixers[SLIDING] = replace(mixers[SLIDING], position=near)
    return gemma2.gemma(theirs, mixers, (SLIDING,) * (every(theirs, "sliding_window_pattern", 6) - 1) + (FULL,))


def config(model: Decoder) -> dict[str, Any]:
    mixers, written = gemma2.described("Gemma3ForCausalLM", "gemma3_text", model)
    ropes = {kind: rope_parameters(m.position) for kind, m in zip(written["layer_types"], mixers, strict=True)}
    return check_roundtrip("gemma3_text", model, written | {"rope_parameters": ropes}, spec)


def table(model: Decoder) -> Table:
    return TABLE
