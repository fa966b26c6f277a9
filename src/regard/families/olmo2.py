"""OLMo 2 (OLMo team 2024): Llama with norms after its sublayers, and norms over the queries and keys of all heads."""

from dataclasses import replace
from typing import Any

from regard.families.common import decoder
from regard.families.common.config_reader import Config
from regard.families.common.names import ATTENTION, FEEDFORWARD
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.models.decoder import Decoder
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import Gated
from regard.parts.norm import NoNorm
from regard.weights.table import Link, Table

DEFAULTS = {"rms_norm_eps": 1e-5}
TABLE = decoder.make_table(
    *decoder.PROJECTIONS,
    *decoder.QK_NORMS,
    Link(f"{decoder.LAYER}.post_attention_layernorm.weight", f"{ATTENTION}.after.weight"),
    Link(f"{decoder.LAYER}.post_feedforward_layernorm.weight", f"{FEEDFORWARD}.after.weight"),
)


def spec(config: dict[str, Any]) -> Decoder:
    hf_config = Config("olmo2", DEFAULTS | config)
    norm = decoder.read_rms_norm(hf_config)
    attention = replace(decoder.read_attention(hf_config), qk_norm=norm, norm_over="all")
    sublayers = (Sublayer(body, NoNorm(), after=norm) for body in (attention, decoder.read_gated(hf_config)))
    return decoder.read_decoder(hf_config, Block(tuple(sublayers)))


def config(model: Decoder) -> dict[str, Any]:
    attention, feedforward = bodies(model.blocks[0], Attention, Gated)
    settings = decoder.llama_config("olmo2", "Olmo2ForCausalLM", model, attention, feedforward)
    return check_roundtrip("olmo2", model, settings | {"attention_bias": attention.bias}, spec)


def table(model: Decoder) -> Table:
    return TABLE
