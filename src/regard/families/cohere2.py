"""Command R7B (Cohere 2024): attention and feed-forward side by side under one LayerNorm without a bias.

Three layers with a window and RoPE (pairs side by side) stand before each that sees all and knows no positions. A head
is always width / heads wide.
"""

from dataclasses import replace
from typing import Any

from regard.families.common.config_reader import Config
from regard.families.common.layer_types import FULL, SLIDING, arranged, by_window, every, layer_types, listed, window
from regard.families.common.rope_config import rope
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.families.llama import ENDS, IGNORED, LAYER, PROJECTIONS, attention, decoder, feedforward, written
from regard.models.decoder import Decoder
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import SwiGLU
from regard.parts.norm import LayerNorm, NoNorm
from regard.parts.position.base import NoPosition
from regard.weights.table import Link, Table

DEFAULTS = {
    "max_position_embeddings": 8192,
    "sliding_window": 4096,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
}
TABLE = Table(
    *ENDS, *PROJECTIONS, Link(f"{LAYER}.input_layernorm.weight", "stack.blocks.{i}.norm.weight"), ignored=IGNORED
)


def spec(config: dict[str, Any]) -> Decoder:
    theirs = Config("cohere2", DEFAULTS | config | {"head_dim": None})
    norm, inner = LayerNorm(theirs.number("layer_norm_eps", 1e-5), bias=False), feedforward(theirs)
    mixers = by_window(theirs, attention(theirs, rope(theirs, layout="interleaved")))
    mixers[FULL] = replace(mixers[FULL], position=NoPosition())
    blocks = {
        kind: Block((Sublayer(mixer, NoNorm()), Sublayer(inner, NoNorm())), style="parallel", norm=norm)
        for kind, mixer in mixers.items()
    }
    pattern = (SLIDING,) * (every(theirs, "sliding_window_pattern", 4) - 1) + (FULL,)
    layers = arranged(theirs, blocks, listed(theirs, "layer_types", str, pattern))
    return replace(decoder(theirs, layers, norm), logit_scale=theirs.number("logit_scale"))


def config(model: Decoder) -> dict[str, Any]:
    pairs = [bodies(block, Attention, SwiGLU) for block in model.blocks]
    mixers = [mixer for mixer, _ in pairs]
    mixer, inner = next((pair for pair in pairs if pair[0].position != NoPosition()), pairs[0])
    common = written("Cohere2ForCausalLM", "cohere2", model, mixer, inner)
    own = {
        "layer_norm_eps": common.pop("rms_norm_eps"),
        "attention_bias": mixer.bias,
        "logit_scale": model.logit_scale,
        "sliding_window": window(mixers) or DEFAULTS["sliding_window"],
        "layer_types": layer_types(mixers),
    }
    return check_roundtrip("cohere2", model, common | own, spec)


def table(model: Decoder) -> Table:
    return TABLE
