"""RecurrentGemma (Botev et al. 2024), the open Griffin: RG-LRU and attention over a window in turns, GeGLU behind each.

Half of each attention head is turned by RoPE. Norms scale by 1 + w, embeddings by √width in bfloat16, and the logits
are capped. Dropout is a choice of the training run and is not taken over.
"""

from typing import Any

import torch

from regard.families.common.activations import OURS, THEIRS
from regard.families.common.config_reader import Config, FamilyError
from regard.families.common.hybrid import first, last, repeating
from regard.families.common.rope_config import rope, rope_parameters
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.kernels.attention.patterns.window import Window
from regard.models.decoder import Decoder
from regard.models.stack import tiled
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.body import Body
from regard.parts.feedforward import Gated
from regard.parts.norm import RMSNorm
from regard.parts.position.rope import Rope
from regard.parts.rg_lru import RGLRU
from regard.weights.ops import ConvTaps
from regard.weights.table import Link, Table

MIXER, FEEDFORWARD = "stack.blocks.{i}.sublayers.0", "stack.blocks.{i}.sublayers.1"
TEMPORAL, UNIT = "model.layers.{i}.temporal_block", "model.layers.{i}.temporal_block.rg_lru"

LINKS = (
    Link("model.embed_tokens.weight", "embedding.weight"),
    Link("model.layers.{i}.temporal_pre_norm.weight", f"{MIXER}.norm.weight"),
    *(Link(f"{TEMPORAL}.{p}_proj.{{leaf}}", f"{MIXER}.body.{p}_proj.{{leaf}}") for p in "qkv"),
    Link(f"{TEMPORAL}.linear_x.{{leaf}}", f"{MIXER}.body.in_proj.{{leaf}}"),
    Link(f"{TEMPORAL}.linear_y.{{leaf}}", f"{MIXER}.body.gate_proj.{{leaf}}"),
    Link(f"{TEMPORAL}.conv_1d.weight", f"{MIXER}.body.conv.weight", ConvTaps()),
    Link(f"{TEMPORAL}.conv_1d.bias", f"{MIXER}.body.conv.bias"),
    Link(f"{UNIT}.input_gate_{{leaf}}", f"{MIXER}.body.i_proj.{{leaf}}"),
    Link(f"{UNIT}.recurrent_gate_{{leaf}}", f"{MIXER}.body.r_proj.{{leaf}}"),
    Link(f"{UNIT}.recurrent_param", f"{MIXER}.body.rate"),
    Link("model.layers.{i}.channel_pre_norm.weight", f"{FEEDFORWARD}.norm.weight"),
    Link("model.layers.{i}.mlp_block.{proj}.{leaf}", f"{FEEDFORWARD}.body.{{proj}}.{{leaf}}"),
    Link("model.final_norm.weight", "norm.weight"),
    Link("lm_head.weight", "head.weight"),
)


def spec(config: dict[str, Any]) -> Decoder:
    theirs = Config("recurrent_gemma", config)
    theirs.only("embeddings_scale_by_sqrt_dim", True)
    width, heads = theirs.integer("hidden_size"), theirs.integer("num_attention_heads")
    norm = RMSNorm(theirs.number("rms_norm_eps", 1e-6), around_one=True)
    activation = theirs.choice("hidden_activation", OURS, "gelu_pytorch_tanh")
    position = rope(theirs, share=0.5)
    if position.scaling is not None:
        raise FamilyError(f"recurrent_gemma: transformers' class knows no rope that is stretched, found {position}")
    attention = Attention(
        heads=heads,
        kv_heads=theirs.integer("num_key_value_heads", heads),
        position=position,
        mask=Window(theirs.integer("attention_window_size", 2048)),
        bias=theirs.flag("attention_bias", False),
        out_bias=True,
    )
    recurrent = RGLRU(
        heads=heads,
        hidden=theirs.integer("lru_width") if theirs.has("lru_width") else None,
        taps=theirs.integer("conv1d_width", 4),
        activation=activation,
    )
    feedforward = Gated(theirs.integer("intermediate_size") // 2, activation, bias=True)
    mixers = {"recurrent": recurrent, "attention": attention}
    words = theirs.each("block_types", str, ("recurrent", "recurrent", "attention"))
    if not words or not {*words} <= mixers.keys():
        raise FamilyError(f"recurrent_gemma: block_types={words!r:.80} should be of 'recurrent' and 'attention'")
    blocks = tuple(Block((Sublayer(mixers[word], norm), Sublayer(feedforward, norm))) for word in words)
    return Decoder(
        vocab=theirs.integer("vocab_size"),
        width=width,
        layers=tiled(blocks, theirs.integer("num_hidden_layers")),
        norm=norm,
        tied=theirs.flag("tie_word_embeddings", True),
        embedding_scale=torch.tensor(width**0.5, dtype=torch.bfloat16).item(),
        softcap=theirs.number("logits_soft_cap", 30.0),
    )


def config(model: Decoder) -> dict[str, Any]:
    mixers, feedforwards = zip(*(bodies(block, Body, Gated) for block in model.blocks), strict=True)
    unit = first(mixers, RGLRU, RGLRU(1))
    attention = first(mixers, Attention, Attention(unit.heads, position=Rope(share=0.5), mask=Window(2048)))
    unit = first(mixers, RGLRU, RGLRU(attention.heads))
    written = {
        "model_type": "recurrent_gemma",
        "architectures": ["RecurrentGemmaForCausalLM"],
        "vocab_size": model.vocab,
        "hidden_size": model.width,
        "intermediate_size": 2 * feedforwards[0].hidden_dim(model.width),
        "num_hidden_layers": len(model.blocks),
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.sizes(model.width)[1],
        "block_types": repeating(["attention" if isinstance(body, Attention) else "recurrent" for body in mixers]),
        "attention_window_size": getattr(attention.mask, "size", 2048),
        "rope_parameters": rope_parameters(attention.position, share=0.5),
        "attention_bias": attention.bias,
        "lru_width": unit.hidden,
        "conv1d_width": unit.taps,
        "hidden_activation": THEIRS[feedforwards[0].activation],
        "logits_soft_cap": model.softcap,
        "rms_norm_eps": getattr(model.norm, "eps", None),
        "tie_word_embeddings": model.tied,
    }
    return check_roundtrip("recurrent_gemma", model, written, spec)


def table(model: Decoder) -> Table:
    o_proj = {Attention: "temporal_block.o_proj", RGLRU: "temporal_block.linear_out"}
    return Table(*LINKS, *last(model, o_proj), ignored=("lm_head.weight",))
