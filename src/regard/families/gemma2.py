"""Gemma 2 (Gemma team 2024): windows in every other layer, norms before and behind sublayers, capped scores and logits.

Its RMSNorm scales by 1 + w, its embeddings are scaled by √width, its feed-forward is a GEGLU, and the scale of its
scores is a setting of its own.
"""

from dataclasses import replace
from typing import Any

from regard.families import llama
from regard.families.common.activations import OURS, THEIRS
from regard.families.common.config_reader import Config, FamilyError
from regard.families.common.layer_types import FULL, SLIDING, arranged, by_window, layer_types, listed, window
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.families.llama import ATTENTION, FEEDFORWARD, LAYER, attention, decoder
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
    Link(f"{LAYER}.input_layernorm.weight", f"{ATTENTION}.norm.weight"),
    Link(f"{LAYER}.post_attention_layernorm.weight", f"{ATTENTION}.after.weight"),
    Link(f"{LAYER}.pre_feedforward_layernorm.weight", f"{FEEDFORWARD}.norm.weight"),
    Link(f"{LAYER}.post_feedforward_layernorm.weight", f"{FEEDFORWARD}.after.weight"),
)
TABLE = Table(*llama.ENDS, *llama.PROJECTIONS, *NORMS, ignored=llama.IGNORED)


def spec(config: dict[str, Any]) -> Decoder:
    theirs = Config("gemma2", DEFAULTS | config)
    mixer = replace(scaled(theirs, attention(theirs)), softcap=cap(theirs, "attn_logit_softcapping"))
    return gemma(theirs, by_window(theirs, mixer), (SLIDING, FULL))


def config(model: Decoder) -> dict[str, Any]:
    mixers, written = described("Gemma2ForCausalLM", "gemma2", model)
    return check_roundtrip("gemma2", model, written | {"attn_logit_softcapping": mixers[0].softcap}, spec)


def table(model: Decoder) -> Table:
    return TABLE


def scaled(theirs: Config, mixer: Attention) -> Attention:
    theirs.only("use_bidirectional_attention", False)
    return replace(mixer, scale=theirs.positive("query_pre_attn_scalar") ** -0.5)


def cap(theirs: Config, key: str) -> float | None:
    return theirs.number(key) if theirs.has(key) else None


def norm(theirs: Config) -> RMSNorm:
    return RMSNorm(theirs.number("rms_norm_eps", 1e-6), around_one=True)


def gemma(theirs: Config, mixers: dict[str, Attention], pattern: tuple[str, ...]) -> Decoder:
    """The model whose layers have these attentions, by their kind."""
    around = norm(theirs)
    inner = Gated(theirs.integer("intermediate_size"), theirs.choice("hidden_activation", OURS, "gelu_pytorch_tanh"))
    blocks = {
        kind: Block((Sublayer(mixer, around, after=around), Sublayer(inner, around, after=around)))
        for kind, mixer in mixers.items()
    }
    layers = arranged(theirs, blocks, listed(theirs, "layer_types", str, pattern))
    model = decoder(theirs, layers, around)
    return replace(model, embedding_scale=model.width**0.5, softcap=cap(theirs, "final_logit_softcapping"))


def described(architecture: str, model_type: str, model: Decoder) -> tuple[list[Attention], dict[str, Any]]:
    """The attentions of a model, and what Gemmas write of it."""
    pairs = [bodies(block, Attention, Gated) for block in model.blocks]
    mixers = [mixer for mixer, _ in pairs]
    mixer, inner = pairs[0]
    if model.width % mixer.heads:
        raise FamilyError(f"transformers' {model_type} wants width={model.width} divisible by heads={mixer.heads}")
    return mixers, llama.written(architecture, model_type, model, mixer, inner) | {
        "attention_bias": mixer.bias,
        "hidden_activation": THEIRS[inner.activation],
        "query_pre_attn_scalar": round(mixer.scale**-2) if mixer.scale else mixer.sizes(model.width)[2],
        "sliding_window": window(mixers) or DEFAULTS["sliding_window"],
        "layer_types": layer_types(mixers),
        "final_logit_softcapping": model.softcap,
    }
