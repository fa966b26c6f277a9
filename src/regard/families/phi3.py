"""Phi-3 (Abdin et al. 2024): Llama with fused projections, windows in some sizes, and LongRoPE for long contexts.

The length that it was first trained on is outside the rope's settings and has priority over the value inside them.
"su" and "yarn" are older names of its LongRoPE.
"""

from dataclasses import replace
from typing import Any

from regard.families.common import decoder
from regard.families.common.config_reader import Config, FamilyError
from regard.families.common.layer_types import window_size
from regard.families.common.names import ATTENTION, FEEDFORWARD, GATE_UP, QKV
from regard.families.common.rope_config import read_rope
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.families.mistral import read_windowed
from regard.models.decoder import Decoder
from regard.parts.attention import Attention
from regard.parts.feedforward import Gated
from regard.parts.position.rope_scaling import LongRope
from regard.weights.ops import Split
from regard.weights.table import Link, Table

DEFAULTS = {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
TABLE = decoder.make_table(
    *decoder.NORMS,
    Link(f"{decoder.LAYER}.self_attn.qkv_proj.{{leaf}}", QKV, Split()),
    Link(f"{decoder.LAYER}.self_attn.o_proj.weight", f"{ATTENTION}.body.o_proj.weight"),
    Link(f"{decoder.LAYER}.mlp.gate_up_proj.{{leaf}}", GATE_UP, Split()),
    Link(f"{decoder.LAYER}.mlp.down_proj.weight", f"{FEEDFORWARD}.body.down_proj.weight"),
)


def spec(config: dict[str, Any]) -> Decoder:
    hf_config = Config("phi3", DEFAULTS | rename_longrope(config))
    position = read_rope(hf_config, share=1.0)
    if position.scaling is not None and not isinstance(position.scaling, LongRope):
        raise FamilyError(f"phi3: rope_type={position.scaling.kind!r} is not supported, only 'longrope' is")
    attention = read_windowed(hf_config, replace(decoder.read_attention(hf_config, position), bias=False))
    return decoder.read_decoder(hf_config, decoder.pre_norm_block(hf_config, attention, decoder.read_gated(hf_config)))


def config(model: Decoder) -> dict[str, Any]:
    attention, feedforward = bodies(model.blocks[0], Attention, Gated)
    settings = decoder.llama_config("phi3", "Phi3ForCausalLM", model, attention, feedforward)
    settings["sliding_window"] = window_size([attention])
    scaling = getattr(attention.position, "scaling", None)
    if isinstance(scaling, LongRope):
        settings["original_max_position_embeddings"] = scaling.length
    return check_roundtrip("phi3", model, settings, spec)


def table(model: Decoder) -> Table:
    return TABLE


def rename_longrope(config: dict[str, Any]) -> dict[str, Any]:
    for key in ("rope_scaling", "rope_parameters"):
        settings = config.get(key)
        if isinstance(settings, dict) and settings.get("rope_type", settings.get("type")) in ("su", "yarn"):
            config = config | {key: settings | {"rope_type": "longrope"}}
    return config
