"""Phi (Gunasekar et al. 2023; phi-1, phi-1.5, phi-2): attention and feed-forward side by side behind one norm.

RoPE turns the first half of every head. Biases everywhere, in the head too; queries and keys may have a norm.
"""

from typing import Any

from regard.families.common.activations import OLDER, OURS
from regard.families.common.config_reader import Config
from regard.families.common.rope_config import rope, rope_parameters
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.families.gptj import ATTENTION, BLOCK, FEEDFORWARD
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import FeedForward
from regard.parts.norm import LayerNorm, NoNorm
from regard.weights.table import Link, Table

TABLE = Table(
    Link("model.embed_tokens.weight", "embedding.weight"),
    Link("model.layers.{i}.input_layernorm.{leaf}", f"{BLOCK}.norm.{{leaf}}"),
    Link("model.layers.{i}.self_attn.dense.{leaf}", f"{ATTENTION}.o_proj.{{leaf}}"),
    Link("model.layers.{i}.self_attn.{side}_layernorm.{leaf}", f"{ATTENTION}.{{side}}_norm.norm.{{leaf}}"),
    *(
        Link(f"model.layers.{{i}}.self_attn.{proj}_proj.{{leaf}}", f"{ATTENTION}.{proj}_proj.{{leaf}}")
        for proj in "qkv"
    ),
    Link("model.layers.{i}.mlp.fc1.{leaf}", f"{FEEDFORWARD}.up_proj.{{leaf}}"),
    Link("model.layers.{i}.mlp.fc2.{leaf}", f"{FEEDFORWARD}.down_proj.{{leaf}}"),
    Link("model.final_layernorm.{leaf}", "norm.{leaf}"),
    Link("lm_head.{leaf}", "head.{leaf}"),
    prefix="model.",
    ignored=("lm_head.weight", "model.layers.{i}.self_attn.rotary_emb.inv_freq"),
)


def spec(config: dict[str, Any]) -> Decoder:
    theirs = Config("phi", config)
    width, heads = theirs.integer("hidden_size"), theirs.integer("num_attention_heads")
    norm = LayerNorm(theirs.number("layer_norm_eps", 1e-5))
    normed = theirs.flag("qk_layernorm", False)
    if normed:
        theirs.only("head_dim", width // max(heads, 1))  # their norms have this width, whatever the heads have
    attention = Attention(
        heads=heads,
        kv_heads=theirs.integer("num_key_value_heads", heads),
        head_dim=theirs.integer("head_dim", width // max(heads, 1)),
        position=rope(theirs, share=0.5),
        bias=True,
        qk_norm=norm if normed else None,
    )
    activation = theirs.choice("hidden_act", OURS, "gelu_new")
    feedforward = FeedForward(theirs.integer("intermediate_size"), activation)
    block = Block((Sublayer(attention, NoNorm()), Sublayer(feedforward, NoNorm())), "parallel", norm)
    return Decoder(
        vocab=theirs.integer("vocab_size"),
        width=width,
        layers=(Repeat((block,), theirs.integer("num_hidden_layers")),),
        norm=norm,
        tied=theirs.flag("tie_word_embeddings", False),
        context=theirs.integer("max_position_embeddings", 2048),
        head_bias=True,
    )


def config(model: Decoder) -> dict[str, Any]:
    attention, feedforward = bodies(model.blocks[0], Attention, FeedForward)
    heads, kv_heads, head_dim = attention.sizes(model.width)
    written = {
        "model_type": "phi",
        "architectures": ["PhiForCausalLM"],
        "vocab_size": model.vocab,
        "hidden_size": model.width,
        "intermediate_size": feedforward.hidden_dim(model.width),
        "num_hidden_layers": len(model.blocks),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": OLDER[feedforward.activation],
        "max_position_embeddings": model.context,
        "layer_norm_eps": getattr(model.norm, "eps", None),
        "rope_parameters": rope_parameters(attention.position, share=0.5),
        "qk_layernorm": attention.qk_norm is not None,
        "tie_word_embeddings": model.tied,
    }
    return check_roundtrip("phi", model, written, spec)


def table(model: Decoder) -> Table:
    return TABLE
