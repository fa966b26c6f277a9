"""BART (Lewis et al. 2019): Vaswani et al.'s encoder-decoder with GELU, learned positions, a norm after the embeddings.

The first two rows of its position tables are unused, and its logits have a bias, which is mostly zero. Marian, Pegasus,
LED and Whisper are variations. Dropout of tokens and layers is an option of training and is not converted.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch

from regard.families.common.config_reader import ACTIVATION_NAMES, Config
from regard.families.common.names import attention_links, module_links
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
Style = Literal["pre", "post"]  # Block.style: whether norms precede or follow the sublayers
STACKS = {"encoder": "source", "decoder": "target"}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")


def spec(config: dict[str, Any]) -> EncoderDecoder:
    hf_config = Config("bart", DEFAULTS | config)
    width, vocab, norm = hf_config.integer("d_model"), hf_config.integer("vocab_size"), LayerNorm()
    position = Learned(hf_config.integer("max_position_embeddings"), offset=2)
    tied = hf_config.flag("tie_word_embeddings")
    scale = embedding_scale(hf_config)
    encoder, decoder = encoder_layers(hf_config, "post"), decoder_layers(hf_config, "post")
    return EncoderDecoder(
        Encoder(Tokens(vocab, scale=scale), width, encoder, position, embedding_norm=norm),
        Decoder(
            vocab, width, decoder, position, NoNorm(), tied, embedding_scale=scale, embedding_norm=norm, head_bias=True
        ),
        shared=tied,  # an untied checkpoint has three embedding tables
    )


def embedding_scale(hf_config: Config) -> float:
    return hf_config.positive("d_model") ** 0.5 if hf_config.flag("scale_embedding") else 1.0


def encoder_layers(hf_config: Config, style: Style, key_bias: bool | None = None) -> Layers:
    attention = Attention(hf_config.integer("encoder_attention_heads"), bias=True, key_bias=key_bias, mask=Full())
    return repeat_blocks((read_block(hf_config, "encoder", style, attention),), hf_config.integer("encoder_layers"))


def decoder_layers(hf_config: Config, style: Style, key_bias: bool | None = None) -> Layers:
    heads = hf_config.integer("decoder_attention_heads")
    mixers = (mixer(heads, bias=True, key_bias=key_bias) for mixer in (Attention, CrossAttention))
    return repeat_blocks((read_block(hf_config, "decoder", style, *mixers),), hf_config.integer("decoder_layers"))


def read_block(hf_config: Config, stack: str, style: Style, *mixers: Body) -> Block:
    norm = LayerNorm()
    feedforward = FeedForward(hf_config.integer(f"{stack}_ffn_dim"), hf_config.activation("activation_function"))
    return Block(tuple(Sublayer(body, norm) for body in (*mixers, feedforward)), style)


def config(model: EncoderDecoder) -> dict[str, Any]:
    length = {"max_position_embeddings": getattr(model.target.position, "length", None)}
    settings = common_config("bart", "BartForConditionalGeneration", model) | length
    return check_roundtrip("bart", model, settings, spec)


def common_config(model_type: str, architecture: str, model: EncoderDecoder) -> dict[str, Any]:
    """The keys that BART and its variations have."""
    source, target = require_type(model, EncoderDecoder).source, model.target
    encoder_attention, encoder_feedforward = bodies(source.blocks[0], Attention, FeedForward)
    decoder_attention, _, decoder_feedforward = bodies(target.blocks[0], Attention, CrossAttention, FeedForward)
    return {
        "model_type": model_type,
        "architectures": [architecture],
        "vocab_size": target.vocab,
        "d_model": target.width,
        "encoder_layers": len(source.blocks),
        "encoder_ffn_dim": encoder_feedforward.hidden_dim(source.width),
        "encoder_attention_heads": encoder_attention.heads,
        "decoder_layers": len(target.blocks),
        "decoder_ffn_dim": decoder_feedforward.hidden_dim(target.width),
        "decoder_attention_heads": decoder_attention.heads,
        "activation_function": ACTIVATION_NAMES[decoder_feedforward.activation],
        "scale_embedding": target.embedding_scale != 1.0,
        "tie_word_embeddings": target.tied,
    }


def table(model: EncoderDecoder) -> Table:
    return common_table(model, "model", *embedding_links("model"), *stack_links("model", "encoder", "self_attn"))


def embedding_links(base: str) -> tuple[Link, ...]:
    """The learned positions and the norm after the embeddings, of both stacks."""
    names = {"embed_positions": "position.table", "layernorm_embedding": "embedding_norm"}.items()
    return module_links(base, {f"{a}.{name}": f"{b}.{ours}" for a, b in STACKS.items() for name, ours in names})


def common_table(
    model: EncoderDecoder, base: str, *links: Link, derived: Mapping[str, Derivation] | None = None
) -> Table:
    """The table of the decoder, the embeddings and the head; `links` are those of all other modules."""
    shared, *separate = (f"{base}.{name}.weight" for name in ("shared", "encoder.embed_tokens", "decoder.embed_tokens"))
    encoder_table, decoder_table = (shared, shared) if model.shared else separate
    copies = dict.fromkeys(separate, shared) | ({"lm_head.weight": decoder_table} if model.target.tied else {})
    return Table(
        Link(encoder_table, "source.input.table.weight"),
        Link(decoder_table, "target.embedding.weight"),
        *stack_links(base, "decoder", "self_attn", "encoder_attn"),
        *links,
        Link("lm_head.weight", "target.head.weight"),
        Link("final_logits_bias", "target.head.bias", Reshape((1, -1))),
        prefix=f"{base}.",
        derived={"final_logits_bias": torch.zeros, **copies, **(derived or {})},
        ignored=(f"{base}.encoder.version", f"{base}.decoder.version", *(() if model.shared else (shared,))),
    )


def stack_links(base: str, stack: str, *mixers: str) -> list[Link]:
    """The layers of one stack; `mixers` are the foreign names of its attentions."""
    layer, ours = f"{base}.{stack}.layers.{{i}}", f"{STACKS[stack]}.stack.blocks.{{i}}.sublayers"
    links = [*feedforward_links(layer, f"{ours}.{len(mixers)}")]
    for n, mixer in enumerate(mixers):
        links += attention_links(f"{layer}.{mixer}", *PROJECTIONS, ours=f"{ours}.{n}.body")
        links += module_links(layer, {f"{mixer}_layer_norm": f"{ours}.{n}.norm"})
    return links


def feedforward_links(layer: str, ours: str) -> tuple[Link, ...]:
    names = {"fc1": "body.up_proj", "fc2": "body.down_proj", "final_layer_norm": "norm"}
    return module_links(layer, {name: f"{ours}.{module}" for name, module in names.items()})
