"""GPT-NeoX (Black et al. 2022; Pythia): attention and feed-forward side by side, each with a norm.

RoPE turns the first quarter of every head. Queries, keys and values are packed head by head. Without
`use_parallel_residual` the sublayers follow each other, as in GPT-2.
"""

from typing import Any

from regard.families.common.activations import OURS, THEIRS
from regard.families.common.config_reader import Config
from regard.families.common.rope_config import rope, rope_parameters
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.families.gpt2 import ATTENTION, FEEDFORWARD, PACKED
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import FeedForward
from regard.parts.norm import LayerNorm
from regard.weights.ops import Split
from regard.weights.table import Link, Table

NO_WEIGHTS = ("bias", "masked_bias", "rotary_emb.inv_freq")  # masks and angles in older files


def spec(config: dict[str, Any]) -> Decoder:
    theirs = Config("gpt_neox", config)
    norm = LayerNorm(theirs.number("layer_norm_eps", 1e-5))
    base, share = theirs.number("rotary_emb_base", 10000.0), theirs.number("rotary_pct", 0.25)
    attention = Attention(
        theirs.integer("num_attention_heads"),
        position=rope(theirs, base, share),
        bias=theirs.flag("attention_bias", True),
    )
    feedforward = FeedForward(theirs.integer("intermediate_size"), theirs.choice("hidden_act", OURS, "gelu"))
    style = "parallel" if theirs.flag("use_parallel_residual", True) else "pre"
    block = Block((Sublayer(attention, norm), Sublayer(feedforward, norm)), style)
    return Decoder(
        vocab=theirs.integer("vocab_size"),
        width=theirs.integer("hidden_size"),
        layers=(Repeat((block,), theirs.integer("num_hidden_layers")),),
        norm=norm,
        tied=theirs.flag("tie_word_embeddings", False),
        context=theirs.integer("max_position_embeddings", 2048),
    )


def config(model: Decoder) -> dict[str, Any]:
    attention, feedforward = bodies(model.blocks[0], Attention, FeedForward)
    written = {
        "model_type": "gpt_neox",
        "architectures": ["GPTNeoXForCausalLM"],
        "vocab_size": model.vocab,
        "hidden_size": model.width,
        "intermediate_size": feedforward.hidden_dim(model.width),
        "num_hidden_layers": len(model.blocks),
        "num_attention_heads": attention.heads,
        "hidden_act": THEIRS[feedforward.activation],
        "max_position_embeddings": model.context,
        "layer_norm_eps": getattr(model.norm, "eps", None),
        "rope_parameters": rope_parameters(attention.position, share=0.25),
        "attention_bias": attention.bias,
        "use_parallel_residual": model.blocks[0].style == "parallel",
        "tie_word_embeddings": model.tied,
    }
    return check_roundtrip("gpt_neox", model, written, spec)


def table(model: Decoder) -> Table:
    attention, _ = bodies(model.layers[0].blocks[0], Attention, FeedForward)
    return Table(
        Link("gpt_neox.embed_in.weight", "embedding.weight"),
        Link("gpt_neox.layers.{i}.input_layernorm.{leaf}", f"{ATTENTION}.norm.{{leaf}}"),
        Link("gpt_neox.layers.{i}.attention.query_key_value.{leaf}", PACKED, Split(groups=attention.heads)),
        Link("gpt_neox.layers.{i}.attention.dense.{leaf}", f"{ATTENTION}.body.o_proj.{{leaf}}"),
        Link("gpt_neox.layers.{i}.post_attention_layernorm.{leaf}", f"{FEEDFORWARD}.norm.{{leaf}}"),
        Link("gpt_neox.layers.{i}.mlp.dense_h_to_4h.{leaf}", f"{FEEDFORWARD}.body.up_proj.{{leaf}}"),
        Link("gpt_neox.layers.{i}.mlp.dense_4h_to_h.{leaf}", f"{FEEDFORWARD}.body.down_proj.{{leaf}}"),
        Link("gpt_neox.final_layer_norm.{leaf}", "norm.{leaf}"),
        Link("embed_out.weight", "head.weight"),
        prefix="gpt_neox.",
        ignored=("embed_out.weight", *(f"gpt_neox.layers.{{i}}.attention.{name}" for name in NO_WEIGHTS)),
    )
