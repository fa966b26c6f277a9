"""Phi-3 (Abdin et al. 2024): Llama with packed projections, a window in some sizes, and LongRoPE in the long ones.

The length it was first trained on stands beside the rope's settings and counts before what they say; "su" and "yarn"
are older names of its LongRoPE.
"""

from dataclasses import replace
from typing import Any

from regard.families import llama
from regard.families.common.config_reader import Config, FamilyError
from regard.families.common.layer_types import SLIDING, by_window, window
from regard.families.common.rope_config import rope
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.families.llama import ATTENTION, FEEDFORWARD, LAYER, attention, decoder, feedforward, pre, written
from regard.models.decoder import Decoder
from regard.parts.attention import Attention
from regard.parts.feedforward import SwiGLU
from regard.parts.position.rope_scaling import LongRope
from regard.weights.ops import Split
from regard.weights.table import Link, Table

DEFAULTS = {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
PACKED = tuple(f"{ATTENTION}.body.{side}_proj.weight" for side in "qkv")
GATED = tuple(f"{FEEDFORWARD}.body.{part}_proj.weight" for part in ("gate", "up"))
TABLE = Table(
    *llama.ENDS,
    *llama.NORMS,
    Link(f"{LAYER}.self_attn.qkv_proj.weight", PACKED, Split()),
    Link(f"{LAYER}.self_attn.o_proj.weight", f"{ATTENTION}.body.o_proj.weight"),
    Link(f"{LAYER}.mlp.gate_up_proj.weight", GATED, Split()),
    Link(f"{LAYER}.mlp.down_proj.weight", f"{FEEDFORWARD}.body.down_proj.weight"),
    ignored=llama.IGNORED,
)


def spec(config: dict[str, Any]) -> Decoder:
    theirs = Config("phi3", DEFAULTS | renamed(config))
    position = rope(theirs, share=1.0)
    if position.scaling is not None and not isinstance(position.scaling, LongRope):
        raise FamilyError(f"phi3: its rope is stretched by longrope, not by {position.scaling.kind}")
    mixer = replace(attention(theirs, position), bias=False)
    mixer = by_window(theirs, mixer).get(SLIDING, mixer)
    return decoder(theirs, pre(theirs, mixer, feedforward(theirs)))


def config(model: Decoder) -> dict[str, Any]:
    mixer, inner = bodies(model.blocks[0], Attention, SwiGLU)
    own = {"sliding_window": window([mixer])}
    scaling = getattr(mixer.position, "scaling", None)
    if isinstance(scaling, LongRope):
        own["original_max_position_embeddings"] = scaling.length
    return check_roundtrip("phi3", model, written("Phi3ForCausalLM", "phi3", model, mixer, inner) | own, spec)


def table(model: Decoder) -> Table:
    return TABLE


def renamed(config: dict[str, Any]) -> dict[str, Any]:
    for key in ("rope_scaling", "rope_parameters"):
        settings = config.get(key)
        if isinstance(settings, dict) and settings.get("rope_type", settings.get("type")) in ("su", "yarn"):
            config = config | {key: settings | {"rope_type": "longrope"}}
    return config
