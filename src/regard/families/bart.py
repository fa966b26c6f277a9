"""BART (Lewis et al. 2019): the 2017 encoder-decoder with GELU, learned positions, and a norm behind the embeddings.

Its tables of positions begin with two rows that no token uses, and its logits have a bias, mostly zeros. Marian,
Pegasus, LED and Whisper are variations. Dropping tokens or layers is a choice of the training run, and not taken over.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch

from regard.families.common.activations import OURS, THEIRS
from regard.families.common.config_reader import Config
from regard.families.common.roundtrip import bodies, check_roundtrip, require_type
from regard.kernels.attention.mask import Full
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.stack import Repeat, tiled
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.body import Body
from regard.parts.cross_attention import CrossAttention
from regard.parts.feedforward import FeedForward
from regard.parts.input import Tokens
from regard.parts.norm import LayerNorm, NoNorm
from regard.parts.position.learned import Learned
from regard.weights.ops import Reshape
from regard.weights.table import Derivation, Link, Table

DEFAULTS = {
    "vocab_size": 50265, "max_position_embeddings": 1024, "d_model": 1024,
    "encoder_layers": 12, "encoder_ffn_dim": 4096, "encoder_attention_heads": 16,
    "decoder_layers": 12, "decoder_ffn_dim": 4096, "decoder_attention_heads": 16,
    "activation_function": "gelu", "scale_embedding": False, "tie_word_embeddings": True,
}  # fmt: skip
Layers = tuple[Repeat, ...]
Names = Mapping[str, str]
Style = Literal["pre", "post"]
ATTENTION = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "out_proj": "o_proj"}


def spec(config: dict[str, Any]) -> EncoderDecoder:
    theirs = Config("bart", DEFAULTS | config)
    width, vocab, norm = theirs.integer("d_model"), theirs.integer("vocab_size"), LayerNorm()
    position, tied = Learned(theirs.integer("max_position_embeddings"), offset=2), theirs.flag("tie_word_embeddings")
    scale, (read, write) = embedding_scale(theirs), layers(theirs, "post")
    return EncoderDecoder(
        Encoder(Tokens(vocab, scale=scale), width, read, position, embedding_norm=norm),
        Decoder(
            vocab, width, write, position, NoNorm(), tied, embedding_scale=scale, embedding_norm=norm, head_bias=True
        ),
        shared=tied,  # untied, theirs has three tables of words
    )


def embedding_scale(theirs: Config) -> float:
    return theirs.positive("d_model") ** 0.5 if theirs.flag("scale_embedding") else 1.0


def layers(theirs: Config, style: Style, key_bias: bool | None = None) -> tuple[Layers, Layers]:
    """Those of the encoder and of the decoder."""
    heads = theirs.integer("decoder_attention_heads")
    own = Attention(heads, bias=True, key_bias=key_bias)
    across = CrossAttention(heads, bias=True, key_bias=key_bias)
    both_ways = Attention(theirs.integer("encoder_attention_heads"), bias=True, key_bias=key_bias, mask=Full())
    return (
        tiled((block(theirs, "encoder", style, both_ways),), theirs.integer("encoder_layers")),
        tiled((block(theirs, "decoder", style, own, across),), theirs.integer("decoder_layers")),
    )


def block(theirs: Config, stack: str, style: Style, *mixers: Body) -> Block:
    norm = LayerNorm()
    last = FeedForward(theirs.integer(f"{stack}_ffn_dim"), theirs.choice("activation_function", OURS))
    return Block(tuple(Sublayer(body, norm) for body in (*mixers, last)), style)


def config(model: EncoderDecoder) -> dict[str, Any]:
    names = {"model_type": "bart", "architectures": ["BartForConditionalGeneration"]}
    places = {"max_position_embeddings": getattr(model.target.position, "length", None)}
    return check_roundtrip("bart", model, names | settings(model) | places, spec)


def settings(model: EncoderDecoder) -> dict[str, Any]:
    """What all variations read alike."""
    source, target = require_type(model, EncoderDecoder).source, model.target
    read, up = bodies(source.blocks[0], Attention, FeedForward)
    write, _, down = bodies(target.blocks[0], Attention, CrossAttention, FeedForward)
    return {
        "vocab_size": target.vocab,
        "d_model": target.width,
        "encoder_layers": len(source.blocks),
        "encoder_ffn_dim": up.hidden_dim(source.width),
        "encoder_attention_heads": read.heads,
        "decoder_layers": len(target.blocks),
        "decoder_ffn_dim": down.hidden_dim(target.width),
        "decoder_attention_heads": write.heads,
        "activation_function": THEIRS[down.activation],
        "scale_embedding": target.embedding_scale != 1.0,
        "tie_word_embeddings": target.tied,
    }


def table(model: EncoderDecoder) -> Table:
    return tables(model, "model", *feet("model"))


def feet(base: str) -> list[Link]:
    """Of both stacks: learned positions, and the norm behind them."""
    names = {"embed_positions": "position.table", "layernorm_embedding": "embedding_norm"}
    sides = {f"{base}.encoder": "source", f"{base}.decoder": "target"}
    return [Link(f"{a}.{x}.{{leaf}}", f"{b}.{y}.{{leaf}}") for a, b in sides.items() for x, y in names.items()]


def tables(
    model: EncoderDecoder,
    base: str,
    *more: Link,
    derived: Mapping[str, Derivation] | None = None,
    reading: Names = ATTENTION,
) -> Table:
    """The stacks, the tables of words and the head, and what a variation has beside; `reading`: of the encoder."""
    shared, *own = (f"{base}.{name}.weight" for name in ("shared", "encoder.embed_tokens", "decoder.embed_tokens"))
    read, write = (shared, shared) if model.shared else own
    copies = dict.fromkeys(own, shared) | ({"lm_head.weight": write} if model.target.tied else {})
    return Table(
        Link(read, "source.input.table.weight"),
        Link(write, "target.embedding.weight"),
        *links(f"{base}.encoder", "source", 1, reading),
        *links(f"{base}.decoder", "target", 2),
        *attention(f"{base}.decoder.layers.{{i}}.encoder_attn", "target.stack.blocks.{i}.sublayers.1"),
        *more,
        Link("lm_head.weight", "target.head.weight"),
        Link("final_logits_bias", "target.head.bias", Reshape((1, -1))),
        prefix=f"{base}.",
        derived={"final_logits_bias": torch.zeros, **copies, **(derived or {})},
        ignored=(f"{base}.encoder.version", f"{base}.decoder.version", *(() if model.shared else (shared,))),
    )


def links(theirs: str, ours: str, last: int, names: Names = ATTENTION) -> list[Link]:
    layer, sublayers = f"{theirs}.layers.{{i}}", f"{ours}.stack.blocks.{{i}}.sublayers"
    return [
        *attention(f"{layer}.self_attn", f"{sublayers}.0", names),
        Link(f"{layer}.fc1.{{leaf}}", f"{sublayers}.{last}.body.up_proj.{{leaf}}"),
        Link(f"{layer}.fc2.{{leaf}}", f"{sublayers}.{last}.body.down_proj.{{leaf}}"),
        Link(f"{layer}.final_layer_norm.{{leaf}}", f"{sublayers}.{last}.norm.{{leaf}}"),
    ]


def attention(theirs: str, ours: str, names: Names = ATTENTION) -> list[Link]:
    projections = [Link(f"{theirs}.{a}.{{leaf}}", f"{ours}.body.{b}.{{leaf}}") for a, b in names.items()]
    return [*projections, Link(f"{theirs}_layer_norm.{{leaf}}", f"{ours}.norm.{{leaf}}")]
