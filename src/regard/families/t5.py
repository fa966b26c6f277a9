"""T5 (Raffel et al. 2019): RMSNorm before every sublayer, relative buckets shared by a stack, unscaled scores.

Version 1.0 (ReLU) reads the table of its words again as its head, and divides by √width before; version 1.1 (gated
GELU) has a head of its own and does not divide. Published configs tell them apart by tie_word_embeddings; those that
transformers 5 writes say true for both, and a head of its own is refused until they say false. Dropout is a choice of
the training run and is not taken over.
"""

from typing import Any

from regard.families.common.activations import OURS, THEIRS
from regard.families.common.config_reader import Config
from regard.families.common.roundtrip import bodies, check_roundtrip, require_type
from regard.kernels.attention.mask import Full
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.stack import tiled
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.body import Body
from regard.parts.cross_attention import CrossAttention
from regard.parts.feedforward import FeedForward, Gated, PositionWise
from regard.parts.input import Tokens
from regard.parts.norm import RMSNorm
from regard.parts.position.t5 import T5Buckets
from regard.weights.table import Link, Table

DEFAULTS = {
    "vocab_size": 32128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8,
    "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128, "layer_norm_epsilon": 1e-6,
    "feed_forward_proj": "relu", "tie_word_embeddings": True,
}  # fmt: skip
TABLES = "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"
CROSS = Link(
    "decoder.block.{i}.layer.1.EncDecAttention.{p}.weight", "target.stack.blocks.{i}.sublayers.1.body.{p}_proj.weight"
)
Bodies = tuple[Body, ...]


def spec(config: dict[str, Any]) -> EncoderDecoder:
    theirs = Config("t5", DEFAULTS | config)
    body = (feedforward(theirs),)
    return stacks(theirs, body, body, theirs.flag("scale_decoder_outputs", True))


def feedforward(theirs: Config) -> PositionWise:
    hidden = theirs.integer("d_ff")
    plain = {name: FeedForward(hidden, ours, bias=False) for name, ours in OURS.items()}
    gated = {f"gated-{name}": Gated(hidden, ours) for name, ours in OURS.items()}
    gated["gated-gelu"] = Gated(hidden, "gelu_tanh")  # behind a gate theirs means this form
    return theirs.choice("feed_forward_proj", plain | gated)


def stacks(theirs: Config, read: Bodies, write: Bodies, scaled: bool, shared: bool = True) -> EncoderDecoder:
    """T5 with these feed-forwards tiled over the depth; `scaled`: a tied head divides; `shared`: one table of words."""
    width, heads, head_dim = theirs.integer("d_model"), theirs.integer("num_heads"), theirs.integer("d_kv")
    tied, norm = theirs.flag("tie_word_embeddings"), RMSNorm(theirs.number("layer_norm_epsilon"))
    own = Attention(heads, head_dim=head_dim, scale=1.0)
    both_ways = Attention(heads, head_dim=head_dim, scale=1.0, mask=Full())
    across = CrossAttention(heads, head_dim=head_dim, scale=1.0)
    buckets = theirs.integer("relative_attention_num_buckets"), theirs.integer("relative_attention_max_distance")
    vocab, depth = theirs.integer("vocab_size"), theirs.integer("num_layers")

    def block(*parts: Body) -> Block:
        return Block(tuple(Sublayer(part, norm) for part in parts))

    return EncoderDecoder(
        Encoder(
            Tokens(vocab),
            width,
            tiled(tuple(block(both_ways, last) for last in read), depth),
            T5Buckets(*buckets, bidirectional=True, heads=heads),
            norm=norm,
        ),
        Decoder(
            vocab,
            width,
            tiled(tuple(block(own, across, last) for last in write), theirs.integer("num_decoder_layers", depth)),
            T5Buckets(*buckets, heads=heads),
            norm=norm,
            tied=tied,
            logit_scale=theirs.positive("d_model") ** -0.5 if tied and scaled else 1.0,
        ),
        shared=shared,
    )


def config(model: EncoderDecoder) -> dict[str, Any]:
    written = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], **settings(model), **body(model)}
    if model.target.tied:
        written["scale_decoder_outputs"] = model.target.logit_scale != 1.0
    return check_roundtrip("t5", model, written, spec)


def settings(model: EncoderDecoder) -> dict[str, Any]:
    """What `stacks` reads."""
    source, target = require_type(model, EncoderDecoder).source, model.target
    attention, _ = bodies(source.blocks[0], Attention, Body)
    position = require_type(source.position, T5Buckets)
    return {
        "vocab_size": target.vocab,
        "d_model": target.width,
        "d_kv": attention.sizes(target.width)[2],
        "num_heads": attention.heads,
        "num_layers": len(source.blocks),
        "num_decoder_layers": len(target.blocks),
        "relative_attention_num_buckets": position.buckets,
        "relative_attention_max_distance": position.distance,
        "layer_norm_epsilon": require_type(target.norm, RMSNorm).eps,
        "tie_word_embeddings": target.tied,
    }


def body(model: EncoderDecoder) -> dict[str, Any]:
    """What `feedforward` reads."""
    _, found = bodies(model.source.blocks[0], Attention, PositionWise)
    gated = {ours: f"gated-{name}" for ours, name in (THEIRS | {"gelu": "gelu_python", "gelu_tanh": "gelu"}).items()}
    word = (gated if isinstance(found, Gated) else THEIRS)[found.activation]
    return {"d_ff": found.hidden_dim(model.target.width), "feed_forward_proj": word}


def table(model: EncoderDecoder) -> Table:
    gated = any(isinstance(sublayer.body, Gated) for sublayer in model.target.layers[0].blocks[0].sublayers)
    names = {"gate_proj": "wi_0", "up_proj": "wi_1"} if gated else {"up_proj": "wi"}
    return Table(
        Link("shared.weight", "source.input.table.weight"),
        *links("encoder", "source", "DenseReluDense", names),
        *links("decoder", "target", "DenseReluDense", names),
        CROSS,
        Link("lm_head.weight", "target.head.weight"),
        derived=dict.fromkeys((*TABLES, "lm_head.weight"), "shared.weight"),
        ignored=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
    )


def links(theirs: str, ours: str, inner: str, names: dict[str, str]) -> list[Link]:
    """Those of one stack; `inner` holds the feed-forward, whose matrices have these names."""
    block, sublayers = f"{theirs}.block.{{i}}.layer", f"{ours}.stack.blocks.{{i}}.sublayers"
    return [
        Link(f"{theirs}.block.0.layer.0.SelfAttention.relative_attention_bias.weight", f"{ours}.position.table.weight"),
        Link(f"{block}.0.SelfAttention.{{p}}.weight", f"{sublayers}.0.body.{{p}}_proj.weight"),
        Link(f"{block}.{{n}}.layer_norm.weight", f"{sublayers}.{{n}}.norm.weight"),
        Link(f"{theirs}.final_layer_norm.weight", f"{ours}.norm.weight"),
        *(
            Link(f"{block}.{{n}}.{inner}.{name}.weight", f"{sublayers}.{{n}}.body.{proj}.weight")
            for proj, name in (names | {"down_proj": "wo"}).items()
        ),
    ]
