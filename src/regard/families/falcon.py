"""Falcon (Almazrouei et al. 2023): attention and feed-forward side by side, few keys for many heads.

    7B     one norm for both, one key for all heads         RW     one after the other, a key a head, ALiBi, biases
    40B    a norm for each, a key a group of heads          11B    one norm for both, a key a group of heads

Queries, keys and values are packed group by group. ALiBi is scaled like the scores. Theirs rounds it to bfloat16,
whatever the model's dtype; ours does not, and from 16 heads on, where slopes are no powers of two, that can be seen.
"""

from typing import Any

from regard.families.common.activations import OURS, THEIRS
from regard.families.common.config_reader import Config, FamilyError
from regard.families.common.rope_config import rope, rope_parameters
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.families.gpt2 import ATTENTION, FEEDFORWARD, PACKED
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import FeedForward
from regard.parts.norm import LayerNorm, NoNorm
from regard.parts.position.alibi import Alibi
from regard.weights.ops import Split
from regard.weights.table import Link, Table


def spec(config: dict[str, Any]) -> Decoder:
    theirs = Config("falcon", config)
    width = theirs.integer("hidden_size")
    biased = theirs.flag("bias", False)
    position = Alibi(scaled=True) if theirs.flag("alibi", False) else rope(theirs)
    attention = Attention(theirs.integer("num_attention_heads"), kv_heads(theirs), position=position, bias=biased)
    hidden = theirs.integer("ffn_hidden_size", 4 * width)
    feedforward = FeedForward(hidden, theirs.choice("activation", OURS, "gelu"), biased)
    norm = LayerNorm(theirs.number("layer_norm_epsilon", 1e-5))
    return Decoder(
        vocab=theirs.integer("vocab_size"),
        width=width,
        layers=(Repeat((block(theirs, attention, feedforward, norm),), theirs.integer("num_hidden_layers")),),
        norm=norm,
        tied=theirs.flag("tie_word_embeddings", True),
        context=theirs.integer("max_position_embeddings", 2048),
    )


def kv_heads(theirs: Config) -> int:
    heads = theirs.integer("num_attention_heads")
    if theirs.flag("new_decoder_architecture", False):
        return theirs.integer("num_kv_heads", heads)
    if theirs.flag("multi_query", True):
        return 1
    theirs.only("num_kv_heads", heads)
    return heads


def block(theirs: Config, attention: Attention, feedforward: FeedForward, norm: LayerNorm) -> Block:
    new = theirs.flag("new_decoder_architecture", False)
    norms = theirs.integer("num_ln_in_parallel_attn", 2 if new else 1)
    if norms not in ((1, 2) if new else (1,)):
        raise FamilyError(f"falcon: num_ln_in_parallel_attn={norms} with new_decoder_architecture={new} is no model")
    if new:
        theirs.only("parallel_attn", True)
    parallel = theirs.flag("parallel_attn", True)
    if parallel and norms == 1:
        return Block((Sublayer(attention, NoNorm()), Sublayer(feedforward, NoNorm())), "parallel", norm)
    return Block((Sublayer(attention, norm), Sublayer(feedforward, norm)), "parallel" if parallel else "pre")


def config(model: Decoder) -> dict[str, Any]:
    first = model.blocks[0]
    attention, feedforward = bodies(first, Attention, FeedForward)
    heads, kv_heads, _ = attention.sizes(model.width)
    parallel = first.style == "parallel"
    two_norms = parallel and first.norm is None
    written = {
        "model_type": "falcon",
        "architectures": ["FalconForCausalLM"],
        "vocab_size": model.vocab,
        "hidden_size": model.width,
        "ffn_hidden_size": feedforward.hidden_dim(model.width),
        "num_hidden_layers": len(model.blocks),
        "num_attention_heads": heads,
        "num_kv_heads": kv_heads,
        "multi_query": kv_heads == 1,
        "new_decoder_architecture": two_norms or parallel and kv_heads not in (1, heads),
        "num_ln_in_parallel_attn": 2 if two_norms else 1,
        "parallel_attn": parallel,
        "activation": THEIRS[feedforward.activation],
        "alibi": isinstance(attention.position, Alibi),
        "rope_parameters": rope_parameters(attention.position),
        "bias": attention.bias,
        "max_position_embeddings": model.context,
        "layer_norm_epsilon": getattr(model.norm, "eps", None),
        "tie_word_embeddings": model.tied,
    }
    return check_roundtrip("falcon", model, written, spec)


def table(model: Decoder) -> Table:
    first = model.layers[0].blocks[0]
    attention, _ = bodies(first, Attention, FeedForward)
    _, groups, _ = attention.sizes(model.width)
    names = ("ln_attn", "ln_mlp") if first.style == "parallel" else ("input_layernorm", "post_attention_layernorm")
    norms = {"input_layernorm": "stack.blocks.{i}.norm.{leaf}"}  # one for both
    if first.norm is None:
        norms = {name: f"stack.blocks.{{i}}.sublayers.{n}.norm.{{leaf}}" for n, name in enumerate(names)}
    return Table(
        Link("transformer.word_embeddings.weight", "embedding.weight"),
        *(Link(f"transformer.h.{{i}}.{name}.{{leaf}}", ours) for name, ours in norms.items()),
        Link("transformer.h.{i}.self_attention.query_key_value.{leaf}", PACKED, Split(groups=groups)),
        Link("transformer.h.{i}.self_attention.dense.{leaf}", f"{ATTENTION}.body.o_proj.{{leaf}}"),
        Link("transformer.h.{i}.mlp.dense_h_to_4h.{leaf}", f"{FEEDFORWARD}.body.up_proj.{{leaf}}"),
        Link("transformer.h.{i}.mlp.dense_4h_to_h.{leaf}", f"{FEEDFORWARD}.body.down_proj.{{leaf}}"),
        Link("transformer.ln_f.{leaf}", "norm.{leaf}"),
        Link("lm_head.weight", "head.weight"),
        prefix="transformer.",
        ignored=("lm_head.weight", "transformer.h.{i}.self_attention.rotary_emb.inv_freq"),
    )
