"""BLOOM (Le Scao et al. 2022): ALiBi as the only position, a norm after the embeddings, biases everywhere.

Queries, keys and values are fused per head. Published configs have the keys `n_embed` and `num_attention_heads`,
and the length of the training sequences (`seq_length`). Published files often lack the prefix `transformer.`.
"""

from typing import Any

from regard.families.common.config_reader import Config
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.families.gpt_neox import layer_links, norm_links
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import FeedForward
from regard.parts.norm import LayerNorm
from regard.parts.position.alibi import Alibi
from regard.weights.table import Link, Table


def spec(config: dict[str, Any]) -> Decoder:
    hf_config = Config("bloom", config)
    hf_config.accept_only("apply_residual_connection_post_layernorm", False)
    norm = LayerNorm(hf_config.number("layer_norm_epsilon", 1e-5))
    heads = hf_config.integer("num_attention_heads" if hf_config.has("num_attention_heads") else "n_head")
    width = hf_config.integer("n_embed" if hf_config.has("n_embed") else "hidden_size")
    depth = hf_config.integer("num_hidden_layers" if hf_config.has("num_hidden_layers") else "n_layer")
    attention = Attention(heads, position=Alibi(), bias=True)
    block = Block((Sublayer(attention, norm), Sublayer(FeedForward(4 * width, "gelu_tanh"), norm)))
    return Decoder(
        vocab=hf_config.integer("vocab_size"),
        width=width,
        layers=(Repeat((block,), depth),),
        norm=norm,
        tied=hf_config.flag("tie_word_embeddings", True),
        context=hf_config.integer_or_none("seq_length"),
        embedding_norm=norm,
    )


def config(model: Decoder) -> dict[str, Any]:
    attention, _ = bodies(model.blocks[0], Attention, FeedForward)
    settings = {
        "model_type": "bloom",
        "architectures": ["BloomForCausalLM"],
        "vocab_size": model.vocab,
        "hidden_size": model.width,
        "n_layer": len(model.blocks),
        "n_head": attention.heads,
        "layer_norm_epsilon": getattr(model.norm, "eps", None),
        "seq_length": model.context,
        "tie_word_embeddings": model.tied,
    }
    return check_roundtrip("bloom", model, settings, spec)


def table(model: Decoder) -> Table:
    attention, _ = bodies(model.layers[0].blocks[0], Attention, FeedForward)
    return Table(
        Link("transformer.word_embeddings.weight", "embedding.weight"),
        Link("transformer.word_embeddings_layernorm.{leaf}", "embedding_norm.{leaf}"),
        *norm_links("transformer.h.{i}"),
        *layer_links("transformer.h.{i}", "self_attention", attention.heads),
        Link("transformer.ln_f.{leaf}", "norm.{leaf}"),
        Link("lm_head.weight", "head.weight"),
        prefix="transformer.",
        ignored=("lm_head.weight",),
    )
