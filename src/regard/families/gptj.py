"""GPT-J (Wang & Komatsuzaki 2021): attention and feed-forward side by side behind one norm; RoPE in adjacent pairs.

Only the first `rotary_dim` coordinates of a head turn. Attention has no biases; the feed-forward and the head have.
"""

from typing import Any

from regard.families.common.activations import OLDER, OURS
from regard.families.common.config_reader import Config, FamilyError
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import FeedForward
from regard.parts.norm import LayerNorm, NoNorm
from regard.parts.position.rope import Rope
from regard.weights.table import Link, Table

BLOCK = "stack.blocks.{i}"
ATTENTION, FEEDFORWARD = f"{BLOCK}.sublayers.0.body", f"{BLOCK}.sublayers.1.body"

TABLE = Table(
    Link("transformer.wte.weight", "embedding.weight"),
    Link("transformer.h.{i}.ln_1.{leaf}", f"{BLOCK}.norm.{{leaf}}"),
    Link("transformer.h.{i}.attn.out_proj.weight", f"{ATTENTION}.o_proj.weight"),
    *(Link(f"transformer.h.{{i}}.attn.{proj}_proj.weight", f"{ATTENTION}.{proj}_proj.weight") for proj in "qkv"),
    Link("transformer.h.{i}.mlp.fc_in.{leaf}", f"{FEEDFORWARD}.up_proj.{{leaf}}"),
    Link("transformer.h.{i}.mlp.fc_out.{leaf}", f"{FEEDFORWARD}.down_proj.{{leaf}}"),
    Link("transformer.ln_f.{leaf}", "norm.{leaf}"),
    Link("lm_head.{leaf}", "head.{leaf}"),
    prefix="transformer.",
    ignored=("lm_head.weight", "transformer.h.{i}.attn.bias", "transformer.h.{i}.attn.masked_bias"),
)


def spec(config: dict[str, Any]) -> Decoder:
    theirs = Config("gptj", config)
    width, heads = theirs.integer("n_embd"), theirs.integer("n_head")
    norm = LayerNorm(theirs.number("layer_norm_epsilon", 1e-5))
    turned, head_dim = theirs.integer("rotary_dim", 64), width // max(heads, 1)
    if not 0 < turned <= head_dim:
        raise FamilyError(f"gptj: rotary_dim={turned} should be above 0 and at most the head's {head_dim}")
    attention = Attention(heads, position=Rope(share=turned / head_dim, layout="interleaved"))
    hidden = theirs.integer("n_inner", 4 * width)
    feedforward = FeedForward(hidden, theirs.choice("activation_function", OURS, "gelu_new"))
    block = Block((Sublayer(attention, NoNorm()), Sublayer(feedforward, NoNorm())), "parallel", norm)
    return Decoder(
        vocab=theirs.integer("vocab_size"),
        width=width,
        layers=(Repeat((block,), theirs.integer("n_layer")),),
        norm=norm,
        tied=theirs.flag("tie_word_embeddings", False),
        context=theirs.integer("n_positions", 2048),
        head_bias=True,
    )


def config(model: Decoder) -> dict[str, Any]:
    attention, feedforward = bodies(model.blocks[0], Attention, FeedForward)
    heads, _, head_dim = attention.sizes(model.width)
    written = {
        "model_type": "gptj",
        "architectures": ["GPTJForCausalLM"],
        "vocab_size": model.vocab,
        "n_embd": model.width,
        "n_positions": model.context,
        "n_layer": len(model.blocks),
        "n_head": heads,
        "rotary_dim": round(getattr(attention.position, "share", 1.0) * head_dim),
        "n_inner": feedforward.hidden_dim(model.width),
        "activation_function": OLDER[feedforward.activation],
        "layer_norm_epsilon": getattr(model.norm, "eps", None),
        "tie_word_embeddings": model.tied,
    }
    return check_roundtrip("gptj", model, written, spec)


def table(model: Decoder) -> Table:
    return TABLE
