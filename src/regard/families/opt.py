"""OPT (Zhang et al. 2022): GPT-2's shape with ReLU, its table of positions beginning with two rows that no token uses.

The one of 350 million parameters differs: norms behind the sublayers and none at the end, and words of half the width,
which a matrix widens on the way in and another narrows on the way out. Dropout is not taken over.
"""

from typing import Any

from regard.families.common.activations import OURS, THEIRS
from regard.families.common.config_reader import Config
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.families.gpt2 import ATTENTION, FEEDFORWARD
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import FeedForward
from regard.parts.norm import LayerNorm, NoNorm
from regard.parts.position.learned import Learned
from regard.weights.table import Link, Table

TABLE = Table(
    Link("model.decoder.embed_tokens.weight", "embedding.weight"),
    Link("model.decoder.project_in.weight", "widen.weight"),
    Link("model.decoder.embed_positions.weight", "position.table.weight"),
    Link("model.decoder.layers.{i}.self_attn.out_proj.{leaf}", f"{ATTENTION}.body.o_proj.{{leaf}}"),
    *(
        Link(f"model.decoder.layers.{{i}}.self_attn.{x}_proj.{{leaf}}", f"{ATTENTION}.body.{x}_proj.{{leaf}}")
        for x in "qkv"
    ),
    Link("model.decoder.layers.{i}.self_attn_layer_norm.{leaf}", f"{ATTENTION}.norm.{{leaf}}"),
    Link("model.decoder.layers.{i}.fc1.{leaf}", f"{FEEDFORWARD}.body.up_proj.{{leaf}}"),
    Link("model.decoder.layers.{i}.fc2.{leaf}", f"{FEEDFORWARD}.body.down_proj.{{leaf}}"),
    Link("model.decoder.layers.{i}.final_layer_norm.{leaf}", f"{FEEDFORWARD}.norm.{{leaf}}"),
    Link("model.decoder.final_layer_norm.{leaf}", "norm.{leaf}"),
    Link("model.decoder.project_out.weight", "narrow.weight"),
    Link("lm_head.weight", "head.weight"),
    prefix="model.",
    ignored=("lm_head.weight",),
)


def spec(config: dict[str, Any]) -> Decoder:
    theirs = Config("opt", config)
    width, context = theirs.integer("hidden_size"), theirs.integer("max_position_embeddings", 2048)
    learned, biased = theirs.flag("layer_norm_elementwise_affine", True), theirs.flag("enable_bias", True)
    norm = LayerNorm(bias=learned, weight=learned)
    before = theirs.flag("do_layer_norm_before", True)
    attention = Attention(theirs.integer("num_attention_heads"), bias=biased)
    activation = theirs.choice("activation_function", OURS, "relu")
    feedforward = FeedForward(theirs.integer("ffn_dim"), activation, biased)
    block = Block((Sublayer(attention, norm), Sublayer(feedforward, norm)), "pre" if before else "post")
    narrow = theirs.integer("word_embed_proj_dim", width)
    return Decoder(
        vocab=theirs.integer("vocab_size"),
        width=width,
        layers=(Repeat((block,), theirs.integer("num_hidden_layers")),),
        position=Learned(context, offset=2),
        norm=norm if before and not theirs.flag("_remove_final_layer_norm", False) else NoNorm(),
        tied=theirs.flag("tie_word_embeddings", True),
        context=context,
        embedding_dim=None if narrow == width else narrow,
    )


def config(model: Decoder) -> dict[str, Any]:
    attention, feedforward = bodies(model.blocks[0], Attention, FeedForward)
    before = model.blocks[0].style == "pre"
    written = {
        "model_type": "opt",
        "architectures": ["OPTForCausalLM"],
        "vocab_size": model.vocab,
        "hidden_size": model.width,
        "word_embed_proj_dim": model.embedding_dim or model.width,
        "num_hidden_layers": len(model.blocks),
        "num_attention_heads": attention.heads,
        "ffn_dim": feedforward.hidden_dim(model.width),
        "activation_function": THEIRS[feedforward.activation],
        "max_position_embeddings": getattr(model.position, "length", model.context),
        "do_layer_norm_before": before,
        "_remove_final_layer_norm": before and isinstance(model.norm, NoNorm),
        "layer_norm_elementwise_affine": getattr(model.blocks[0].sublayers[0].norm, "weight", True),
        "enable_bias": attention.bias,
        "tie_word_embeddings": model.tied,
    }
    return check_roundtrip("opt", model, written, spec)


def table(model: Decoder) -> Table:
    return TABLE
