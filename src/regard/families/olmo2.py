"""OLMo 2 (OLMo team 2024): Llama with norms behind its sublayers, and one over all heads' queries or keys at once."""

from dataclasses import replace
from typing import Any

from regard.families import llama
from regard.families.common.config_reader import Config
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.families.llama import ATTENTION, FEEDFORWARD, LAYER, attention, decoder, feedforward, norm, written
from regard.models.decoder import Decoder
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import SwiGLU
from regard.parts.norm import NoNorm
from regard.weights.table import Link, Table

DEFAULTS = {"rms_norm_eps": 1e-5}
TABLE = Table(
    *llama.ENDS,
    *llama.PROJECTIONS,
    *llama.QK_NORMS,
    Link(f"{LAYER}.post_attention_layernorm.weight", f"{ATTENTION}.after.weight"),
    Link(f"{LAYER}.post_feedforward_layernorm.weight", f"{FEEDFORWARD}.after.weight"),
    ignored=llama.IGNORED,
)


def spec(config: dict[str, Any]) -> Decoder:
    theirs = Config("olmo2", DEFAULTS | config)
    mixer = replace(attention(theirs), qk_norm=norm(theirs), norm_over="all")
    parts = mixer, feedforward(theirs)
    return decoder(theirs, Block(tuple(Sublayer(part, NoNorm(), after=norm(theirs)) for part in parts)))


def config(model: Decoder) -> dict[str, Any]:
    mixer, inner = bodies(model.blocks[0], Attention, SwiGLU)
    own = {"attention_bias": mixer.bias}
    return check_roundtrip("olmo2", model, written("Olmo2ForCausalLM", "olmo2", model, mixer, inner) | own, spec)


def table(model: Decoder) -> Table:
    return TABLE
