"""Command R7B (Cohere 2024): attention and feed-forward in parallel after one LayerNorm without a bias.

Three layers with a window and RoPE (interleaved pairs) alternate with one full-attention layer without positions. The
head dimension is always width / heads.
"""

from dataclasses import replace
from typing import Any

from regard.families.common import decoder
from regard.families.common.config_reader import Config
from regard.families.common.layer_types import FULL, attention_by_type, sliding_then_full, tile_by_type, window_config
from regard.families.common.names import BLOCK
from regard.families.common.rope_config import read_rope
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.models.decoder import Decoder
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import Gated
from regard.parts.norm import LayerNorm, NoNorm
from regard.parts.position.base import NoPosition
from regard.weights.table import Link, Table

DEFAULTS = {
    "max_position_embeddings": 8192,
    "sliding_window": 4096,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
}
NORM = Link(f"{decoder.LAYER}.input_layernorm.weight", f"{BLOCK}.norm.weight")
TABLE = decoder.make_table(*decoder.PROJECTIONS, NORM)


def spec(config: dict[str, Any]) -> Decoder:
    hf_config = Config("cohere2", DEFAULTS | config | {"head_dim": None})
    norm, feedforward = LayerNorm(hf_config.number("layer_norm_eps", 1e-5), bias=False), decoder.read_gated(hf_config)
    rope = read_rope(hf_config, layout="interleaved")
    attentions = attention_by_type(hf_config, decoder.read_attention(hf_config, rope))
    attentions[FULL] = replace(attentions[FULL], position=NoPosition())
    blocks = {
        kind: Block((Sublayer(attention, NoNorm()), Sublayer(feedforward, NoNorm())), style="parallel", norm=norm)
        for kind, attention in attentions.items()
    }
    layers = tile_by_type(hf_config, blocks, sliding_then_full(hf_config, "sliding_window_pattern", 4))
    return replace(decoder.read_decoder(hf_config, layers, norm), logit_scale=hf_config.number("logit_scale"))


def config(model: Decoder) -> dict[str, Any]:
    pairs = [bodies(block, Attention, Gated) for block in model.blocks]
    attentions = [attention for attention, _ in pairs]
    attention, feedforward = next((pair for pair in pairs if pair[0].position != NoPosition()), pairs[0])
    settings = decoder.llama_config("cohere2", "Cohere2ForCausalLM", model, attention, feedforward)
    settings |= {
        "layer_norm_eps": settings.pop("rms_norm_eps"),
        "attention_bias": attention.bias,
        "logit_scale": model.logit_scale,
        **window_config(attentions, default=4096),
    }
    return check_roundtrip("cohere2", model, settings, spec)


def table(model: Decoder) -> Table:
    return TABLE
