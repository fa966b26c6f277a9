"""T5 (Raffel et al. 2019): RMSNorm before every sublayer, relative position buckets, unscaled scores.

All layers of a stack share one table of buckets. Version 1.0 (ReLU) has a tied head and divides the final hidden state
by √width; version 1.1 (gated GELU) has an untied head and does not. Their published configs differ in
`tie_word_embeddings`. Configs that transformers 5 writes have true for both versions and differ in
`scale_decoder_outputs`; the files then show whether the head is tied (checkpoint/stored_parts.py). Dropout is an
option of training and is not converted.
"""

from dataclasses import replace
from typing import Any

from regard.families.common.config_reader import ACTIVATION_NAMES, ACTIVATIONS, Config
from regard.families.common.roundtrip import bodies, check_roundtrip, require_type
from regard.kernels.attention.mask import Full
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.stack import Repeat, repeat_blocks
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
STACKS = {"encoder": "source", "decoder": "target"}
EMBEDDINGS = tuple(f"{stack}.embed_tokens.weight" for stack in STACKS)
BUCKETS = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
FeedForwards = tuple[Body, ...]


def spec(config: dict[str, Any]) -> EncoderDecoder:
    hf_config = Config("t5", DEFAULTS | config)
    feedforwards = (read_feedforward(hf_config),)
    scaled = hf_config.flag("scale_decoder_outputs", hf_config.flag("tie_word_embeddings"))
    return read_t5(hf_config, feedforwards, feedforwards, scaled)


def read_feedforward(hf_config: Config) -> PositionWise:
    hidden = hf_config.integer("d_ff")
    ungated = {name: FeedForward(hidden, ours, bias=False) for name, ours in ACTIVATIONS.items()}
    gated = {f"gated-{name}": Gated(hidden, ours) for name, ours in ACTIVATIONS.items()}
    gated["gated-gelu"] = Gated(hidden, "gelu_tanh")  # in a gated unit, transformers computes gelu by tanh
    return hf_config.choice("feed_forward_proj", ungated | gated)


def read_t5(
    hf_config: Config, encoder: FeedForwards, decoder: FeedForwards, scaled: bool, shared: bool = True
) -> EncoderDecoder:
    """T5 with these feed-forwards tiled over the depth of each stack.

    `scaled`: the final hidden state is divided by √width; `shared`: both stacks have one embedding table.
    """
    width, vocab = hf_config.integer("d_model"), hf_config.integer("vocab_size")
    heads, head_dim = hf_config.integer("num_heads"), hf_config.integer("d_kv")
    tied, norm = hf_config.flag("tie_word_embeddings"), RMSNorm(hf_config.number("layer_norm_epsilon"))
    causal = Attention(heads, head_dim=head_dim, scale=1.0)
    cross = CrossAttention(heads, head_dim=head_dim, scale=1.0)
    buckets, distance = (hf_config.integer(f"relative_attention_{key}") for key in ("num_buckets", "max_distance"))
    position = T5Buckets(buckets, distance, heads=heads)
    depth = hf_config.integer("num_layers")

    def make_layers(feedforwards: FeedForwards, depth: int, *mixers: Body) -> tuple[Repeat, ...]:
        blocks = (Block(tuple(Sublayer(body, norm) for body in (*mixers, feedforward))) for feedforward in feedforwards)
        return repeat_blocks(tuple(blocks), depth)

    source = make_layers(encoder, depth, replace(causal, mask=Full()))
    target = make_layers(decoder, hf_config.integer("num_decoder_layers", depth), causal, cross)
    scale = hf_config.positive("d_model") ** -0.5 if scaled else 1.0
    return EncoderDecoder(
        Encoder(Tokens(vocab), width, source, replace(position, bidirectional=True), norm=norm),
        Decoder(vocab, width, target, position, norm, tied, logit_scale=scale),
        shared=shared,
    )


def config(model: EncoderDecoder) -> dict[str, Any]:
    settings = common_config("t5", "T5ForConditionalGeneration", model) | feedforward_config(model)
    settings["scale_decoder_outputs"] = model.target.logit_scale != 1.0
    return check_roundtrip("t5", model, settings, spec)


def common_config(model_type: str, architecture: str, model: EncoderDecoder) -> dict[str, Any]:
    """The keys that `read_t5` reads."""
    source, target = require_type(model, EncoderDecoder).source, model.target
    attention, _ = bodies(source.blocks[0], Attention, Body)
    position = require_type(source.position, T5Buckets)
    return {
        "model_type": model_type,
        "architectures": [architecture],
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


def feedforward_config(model: EncoderDecoder) -> dict[str, Any]:
    """The keys that `read_feedforward` reads."""
    _, feedforward = bodies(model.source.blocks[0], Attention, PositionWise)
    names = ACTIVATION_NAMES
    if isinstance(feedforward, Gated):
        names = {ours: f"gated-{name}" for ours, name in (names | {"gelu": "gelu_python", "gelu_tanh": "gelu"}).items()}
    return {"d_ff": feedforward.hidden_dim(model.target.width), "feed_forward_proj": names[feedforward.activation]}


def table(model: EncoderDecoder) -> Table:
    gated = any(isinstance(sublayer.body, Gated) for sublayer in model.target.layers[0].blocks[0].sublayers)
    names = {"gate_proj": "wi_0", "up_proj": "wi_1"} if gated else {"up_proj": "wi"}
    return Table(
        Link("shared.weight", "source.input.table.weight"),
        *stack_links("DenseReluDense", names),
        Link("lm_head.weight", "target.head.weight"),
        derived=dict.fromkeys((*EMBEDDINGS, "lm_head.weight"), "shared.weight"),
        ignored=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
    )


def stack_links(feedforward: str, names: dict[str, str]) -> list[Link]:
    """The layers of both stacks; the matrices of the module `feedforward` have these names."""
    cross = "decoder.block.{i}.layer.1.EncDecAttention.{p}.weight"
    links = [Link(cross, "target.stack.blocks.{i}.sublayers.1.body.{p}_proj.weight")]
    for stack, ours in STACKS.items():
        layer, sublayers = f"{stack}.block.{{i}}.layer", f"{ours}.stack.blocks.{{i}}.sublayers"
        links += [
            Link(f"{stack}.{BUCKETS}", f"{ours}.position.table.weight"),
            Link(f"{layer}.0.SelfAttention.{{p}}.weight", f"{sublayers}.0.body.{{p}}_proj.weight"),
            Link(f"{layer}.{{n}}.layer_norm.weight", f"{sublayers}.{{n}}.norm.weight"),
            Link(f"{stack}.final_layer_norm.weight", f"{ours}.norm.weight"),
        ]
        links += (
            Link(f"{layer}.{{n}}.{feedforward}.{name}.weight", f"{sublayers}.{{n}}.body.{proj}.weight")
            for proj, name in (names | {"down_proj": "wo"}).items()
        )
    return links
