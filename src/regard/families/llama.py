"""Llama (Touvron et al. 2023): RMSNorm before every sublayer, grouped-query attention with RoPE, SwiGLU, no biases.

Dropout is a choice of the training run and is not taken over.
"""

from typing import Any

from regard.families.expressed import bodies, expressed
from regard.families.foreign import Config, FamilyError
from regard.families.rope import rope, rope_parameters
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import SwiGLU
from regard.parts.norm import RMSNorm
from regard.weights.table import Link, Table

ATTENTION, FEEDFORWARD = "stack.blocks.{i}.sublayers.0", "stack.blocks.{i}.sublayers.1"

TABLE = Table(
    Link("model.embed_tokens.weight", "embedding.weight"),
    Link("model.layers.{i}.input_layernorm.weight", f"{ATTENTION}.norm.weight"),
    Link("model.layers.{i}.self_attn.{proj}.{leaf}", f"{ATTENTION}.body.{{proj}}.{{leaf}}"),
    Link("model.layers.{i}.post_attention_layernorm.weight", f"{FEEDFORWARD}.norm.weight"),
    Link("model.layers.{i}.mlp.{proj}.{leaf}", f"{FEEDFORWARD}.body.{{proj}}.{{leaf}}"),
    Link("model.norm.weight", "norm.weight"),
    Link("lm_head.weight", "head.weight"),
    ignored=("lm_head.weight", "model.layers.{i}.self_attn.rotary_emb.inv_freq"),
)


def spec(config: dict[str, Any]) -> Decoder:
    theirs = Config("llama", config)
    theirs.only("hidden_act", "silu")
    norm = RMSNorm(theirs.number("rms_norm_eps", 1e-6))
    width, heads = theirs.integer("hidden_size"), theirs.integer("num_attention_heads")
    attention = Attention(
        heads=heads,
        kv_heads=theirs.integer("num_key_value_heads", heads),
        head_dim=theirs.integer("head_dim", width // max(heads, 1)),
        position=rope(theirs),
        bias=theirs.flag("attention_bias", False),
    )
    feedforward = SwiGLU(theirs.integer("intermediate_size"), bias=theirs.flag("mlp_bias", False))
    block = Block((Sublayer(attention, norm), Sublayer(feedforward, norm)))
    return Decoder(
        vocab=theirs.integer("vocab_size"),
        width=width,
        layers=(Repeat((block,), theirs.integer("num_hidden_layers")),),
        norm=norm,
        tied=theirs.flag("tie_word_embeddings", False),
        context=theirs.integer("max_position_embeddings", 2048),
    )


def config(model: Decoder) -> dict[str, Any]:
    attention, feedforward = bodies(model.blocks[0], Attention, SwiGLU)
    heads, kv_heads, head_dim = attention.sizes(model.width)
    if model.width % heads:
        raise FamilyError(f"transformers' llama wants width={model.width} to be divisible by heads={heads}")
    written = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": model.vocab,
        "hidden_size": model.width,
        "intermediate_size": feedforward.hidden_dim(model.width),
        "num_hidden_layers": len(model.blocks),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": model.context,
        "rms_norm_eps": getattr(model.norm, "eps", None),
        "rope_parameters": rope_parameters(attention.position),
        "attention_bias": attention.bias,
        "mlp_bias": feedforward.bias,
        "tie_word_embeddings": model.tied,
    }
    return expressed("llama", model, written, spec)


def table(model: Decoder) -> Table:
    return TABLE
