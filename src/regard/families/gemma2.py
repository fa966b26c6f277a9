"""Gemma 2 (Gemma team 2024): windows in every other layer, norms before and after sublayers, softcapped logits.

The scores are softcapped too, and their scale is a separate setting. RMSNorm scales by 1 + w, embeddings are scaled
by √width, and the feed-forward is GEGLU.
"""

from dataclasses import replace
from typing import Any

from regard.families.common import decoder
from regard.families.common.config_reader import ACTIVATION_NAMES, Config
from regard.families.common.layer_types import FULL, SLIDING, attention_by_type, tile_by_type, window_config
from regard.families.common.names import ATTENTION, FEEDFORWARD
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.models.decoder import Decoder
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import Gated
from regard.parts.norm import RMSNorm
from regard.weights.table import Link, Table

DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
}
NORMS = (
    Link(f"{decoder.LAYER}.input_layernorm.weight", f"{ATTENTION}.norm.weight"),
    Link(f"{decoder.LAYER}.post_attention_layernorm.weight", f"{ATTENTION}.after.weight"),
    Link(f"{decoder.LAYER}.pre_feedforward_layernorm.weight", f"{FEEDFORWARD}.norm.weight"),
    Link(f"{decoder.LAYER}.post_feedforward_layernorm.weight", f"{FEEDFORWARD}.after.weight"),
)
TABLE = decoder.make_table(*decoder.PROJECTIONS, *NORMS)


def spec(config: dict[str, Any]) -> Decoder:
    hf_config = Config("gemma2", DEFAULTS | config)
    softcap = hf_config.number_or_none("attn_logit_softcapping")
    attention = replace(decoder.read_attention(hf_config), scale=read_scale(hf_config), softcap=softcap)
    return read_gemma(hf_config, attention_by_type(hf_config, attention), (SLIDING, FULL))


def config(model: Decoder) -> dict[str, Any]:
    attentions, settings = gemma_config("gemma2", "Gemma2ForCausalLM", model)
    return check_roundtrip("gemma2", model, settings | {"attn_logit_softcapping": attentions[0].softcap}, spec)


def table(model: Decoder) -> Table:
    return TABLE


def read_scale(hf_config: Config) -> float:
    hf_config.accept_only("use_bidirectional_attention", False)
    return hf_config.positive("query_pre_attn_scalar") ** -0.5


def read_norm(hf_config: Config) -> RMSNorm:
    return RMSNorm(hf_config.number("rms_norm_eps", 1e-6), around_one=True)


def read_gemma(hf_config: Config, attentions: dict[str, Attention], default_types: tuple[str, ...]) -> Decoder:
    """The model whose layers have the attention of their layer type."""
    norm = read_norm(hf_config)
    activation = hf_config.activation("hidden_activation", "gelu_pytorch_tanh")
    feedforward = Gated(hf_config.integer("intermediate_size"), activation)
    blocks = {
        kind: Block((Sublayer(attention, norm, after=norm), Sublayer(feedforward, norm, after=norm)))
        for kind, attention in attentions.items()
    }
    layers = tile_by_type(hf_config, blocks, default_types)
    model, softcap = decoder.read_decoder(hf_config, layers, norm), hf_config.number_or_none("final_logit_softcapping")
    return replace(model, embedding_scale=model.width**0.5, softcap=softcap)


def gemma_config(model_type: str, architecture: str, model: Decoder) -> tuple[list[Attention], dict[str, Any]]:
    """The attention of every layer, and the keys that all Gemmas have."""
    pairs = [bodies(block, Attention, Gated) for block in model.blocks]
    attentions = [attention for attention, _ in pairs]
    attention, feedforward = pairs[0]
    decoder.require_divisible(model_type, model, attention.heads)
    return attentions, decoder.llama_config(model_type, architecture, model, attention, feedforward) | {
        "attention_bias": attention.bias,
        "hidden_activation": ACTIVATION_NAMES[feedforward.activation],
        "query_pre_attn_scalar": round(attention.scale**-2) if attention.scale else attention.sizes(model.width)[2],
        **window_config(attentions, default=4096),
        "final_logit_softcapping": model.softcap,
    }
