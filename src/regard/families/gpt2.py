"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm before every sublayer, GELU, biases everywhere.

Its linears are stored as (in, out), queries, keys and values packed into one. Dropout is a choice of the training run
and is not taken over. Published files often lack the prefix `transformer.` and carry masks that are no weights.
"""

from typing import Any

from regard.families.common.activations import OLDER, OURS
from regard.families.common.config_reader import Config
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import Activation, FeedForward
from regard.parts.norm import LayerNorm
from regard.parts.position.learned import Learned
from regard.weights.ops import Split, Transpose
from regard.weights.table import Link, Table

ATTENTION, FEEDFORWARD = "stack.blocks.{i}.sublayers.0", "stack.blocks.{i}.sublayers.1"
PACKED = tuple(f"{ATTENTION}.body.{proj}_proj.{{leaf}}" for proj in "qkv")

TABLE = Table(
    Link("transformer.wte.weight", "embedding.weight"),
    Link("transformer.wpe.weight", "position.table.weight"),
    Link("transformer.h.{i}.ln_1.{leaf}", f"{ATTENTION}.norm.{{leaf}}"),
    Link("transformer.h.{i}.attn.c_attn.{leaf}", PACKED, Transpose(), Split()),
    Link("transformer.h.{i}.attn.c_proj.{leaf}", f"{ATTENTION}.body.o_proj.{{leaf}}", Transpose()),
    Link("transformer.h.{i}.ln_2.{leaf}", f"{FEEDFORWARD}.norm.{{leaf}}"),
    Link("transformer.h.{i}.mlp.c_fc.{leaf}", f"{FEEDFORWARD}.body.up_proj.{{leaf}}", Transpose()),
    Link("transformer.h.{i}.mlp.c_proj.{leaf}", f"{FEEDFORWARD}.body.down_proj.{{leaf}}", Transpose()),
    Link("transformer.ln_f.{leaf}", "norm.{leaf}"),
    Link("lm_head.weight", "head.weight"),
    prefix="transformer.",
    ignored=("lm_head.weight", "transformer.h.{i}.attn.bias", "transformer.h.{i}.attn.masked_bias"),
)


def spec(config: dict[str, Any]) -> Decoder:
    theirs = Config("gpt2", config)
    theirs.only("scale_attn_by_inverse_layer_idx", False)
    return decoder(theirs, None, "gelu_new")


def decoder(theirs: Config, kv_heads: int | None, activation: str) -> Decoder:
    """GPT-2 as other families vary it; `activation` is the one that theirs has where the config names none."""
    theirs.only("add_cross_attention", False)
    width, context = theirs.integer("n_embd"), theirs.integer("n_positions", 1024)
    norm = LayerNorm(theirs.number("layer_norm_epsilon", 1e-5))
    scale = None if theirs.flag("scale_attn_weights", True) else 1.0
    attention = Attention(theirs.integer("n_head"), kv_heads, bias=True, scale=scale)
    hidden = theirs.integer("n_inner", 4 * width)
    feedforward = FeedForward(hidden, theirs.choice("activation_function", OURS, activation))
    block = Block((Sublayer(attention, norm), Sublayer(feedforward, norm)))
    return Decoder(
        vocab=theirs.integer("vocab_size"),
        width=width,
        layers=(Repeat((block,), theirs.integer("n_layer")),),
        position=Learned(context),
        norm=norm,
        tied=theirs.flag("tie_word_embeddings", True),
        context=context,
    )


def config(model: Decoder) -> dict[str, Any]:
    written = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **settings(model, OLDER)}
    return check_roundtrip("gpt2", model, written, spec)


def settings(model: Decoder, names: dict[Activation, str]) -> dict[str, Any]:
    """What `decoder` reads; `names` of activations."""
    attention, feedforward = bodies(model.blocks[0], Attention, FeedForward)
    return {
        "vocab_size": model.vocab,
        "n_embd": model.width,
        "n_positions": getattr(model.position, "length", model.context),
        "n_layer": len(model.blocks),
        "n_head": attention.heads,
        "n_inner": feedforward.hidden_dim(model.width),
        "activation_function": names[feedforward.activation],
        "layer_norm_epsilon": getattr(model.norm, "eps", None),
        "scale_attn_weights": attention.scale != 1.0,
        "tie_word_embeddings": model.tied,
    }


def table(model: Decoder) -> Table:
    return TABLE
