"""Phi (Gunasekar et al. 2023; phi-1, phi-1.5, phi-2): attention and feed-forward in parallel after one norm.

RoPE rotates the first half of each head. Biases everywhere, also in the head; queries and keys may have norms.
"""

from dataclasses import replace
from typing import Any

from regard.families.common.config_reader import LEGACY_ACTIVATION_NAMES, Config
from regard.families.common.decoder import IGNORED, LAYER, decoder_config, head_config, read_attention, read_decoder
from regard.families.common.names import ATTENTION, BLOCK, FEEDFORWARD, attention_links, module_links
from regard.families.common.rope_config import read_rope, rope_parameters
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.models.decoder import Decoder
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import FeedForward
from regard.parts.norm import LayerNorm, NoNorm
from regard.weights.table import Link, Table

NAMES = {
    "input_layernorm": f"{BLOCK}.norm",
    "self_attn.{side}_layernorm": f"{ATTENTION}.body.{{side}}_norm.norm",
    "mlp.fc1": f"{FEEDFORWARD}.body.up_proj",
    "mlp.fc2": f"{FEEDFORWARD}.body.down_proj",
}
TABLE = Table(
    Link("model.embed_tokens.weight", "embedding.weight"),
    *attention_links(f"{LAYER}.self_attn", "q_proj", "k_proj", "v_proj", "dense"),
    *module_links(LAYER, NAMES),
    Link("model.final_layernorm.{leaf}", "norm.{leaf}"),
    Link("lm_head.{leaf}", "head.{leaf}"),
    prefix="model.",
    ignored=IGNORED,
)


def spec(config: dict[str, Any]) -> Decoder:
    hf_config = Config("phi", config)
    norm = LayerNorm(hf_config.number("layer_norm_eps", 1e-5))
    qk_norm = norm if hf_config.flag("qk_layernorm", False) else None
    if qk_norm:  # in transformers these norms have width / heads channels, even if head_dim differs
        heads = max(hf_config.integer("num_attention_heads"), 1)
        hf_config.accept_only("head_dim", hf_config.integer("hidden_size") // heads)
    attention = replace(read_attention(hf_config, read_rope(hf_config, share=0.5)), bias=True, qk_norm=qk_norm)
    feedforward = FeedForward(hf_config.integer("intermediate_size"), hf_config.activation("hidden_act", "gelu_new"))
    block = Block((Sublayer(attention, NoNorm()), Sublayer(feedforward, NoNorm())), "parallel", norm)
    return replace(read_decoder(hf_config, block, norm), head_bias=True)


def config(model: Decoder) -> dict[str, Any]:
    attention, feedforward = bodies(model.blocks[0], Attention, FeedForward)
    settings = decoder_config("phi", "PhiForCausalLM", model) | {
        "intermediate_size": feedforward.hidden_dim(model.width),
        **head_config(model, attention),
        "hidden_act": LEGACY_ACTIVATION_NAMES[feedforward.activation],
        "max_position_embeddings": model.context,
        "layer_norm_eps": getattr(model.norm, "eps", None),
        "rope_parameters": rope_parameters(attention.position, share=0.5),
        "qk_layernorm": attention.qk_norm is not None,
    }
    return check_roundtrip("phi", model, settings, spec)


def table(model: Decoder) -> Table:
    return TABLE
