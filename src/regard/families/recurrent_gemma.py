"""RecurrentGemma (Botev et al. 2024), the open Griffin: layers of RG-LRU and of windowed attention, each with GEGLU.

RoPE rotates half of each attention head. Norms scale by 1 + w, embeddings by √width in bfloat16, and the logits are
softcapped. Dropout is an option of training and is not converted.
"""

from dataclasses import replace
from typing import Any

import torch

from regard.families.common.config_reader import ACTIVATION_NAMES, Config
from regard.families.common.decoder import decoder_config, read_decoder
from regard.families.common.layer_types import first_of_type, output_projections, shortest_period
from regard.families.common.names import ATTENTION, FEEDFORWARD, module_links
from regard.families.common.rope_config import read_rope, rope_parameters
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.kernels.attention.patterns.window import Window
from regard.models.decoder import Decoder
from regard.models.stack import repeat_blocks
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.body import Body
from regard.parts.feedforward import Activation, Gated
from regard.parts.norm import RMSNorm
from regard.parts.position.rope import Rope
from regard.parts.rg_lru import RGLRU
from regard.weights.ops import ConvTaps
from regard.weights.table import Link, Table

TEMPORAL = "model.layers.{i}.temporal_block"
PROJECTIONS = {f"{proj}_proj": f"{ATTENTION}.body.{proj}_proj" for proj in "qkv"}
PROJECTIONS |= {"linear_x": f"{ATTENTION}.body.in_proj", "linear_y": f"{ATTENTION}.body.gate_proj"}
LINKS = (
    Link("model.embed_tokens.weight", "embedding.weight"),
    Link("model.layers.{i}.temporal_pre_norm.weight", f"{ATTENTION}.norm.weight"),
    *module_links(TEMPORAL, PROJECTIONS),
    Link(f"{TEMPORAL}.conv_1d.weight", f"{ATTENTION}.body.conv.weight", ConvTaps()),
    Link(f"{TEMPORAL}.conv_1d.bias", f"{ATTENTION}.body.conv.bias"),
    Link(f"{TEMPORAL}.rg_lru.input_gate_{{leaf}}", f"{ATTENTION}.body.i_proj.{{leaf}}"),
    Link(f"{TEMPORAL}.rg_lru.recurrent_gate_{{leaf}}", f"{ATTENTION}.body.r_proj.{{leaf}}"),
    Link(f"{TEMPORAL}.rg_lru.recurrent_param", f"{ATTENTION}.body.rate"),
    Link("model.layers.{i}.channel_pre_norm.weight", f"{FEEDFORWARD}.norm.weight"),
    Link("model.layers.{i}.mlp_block.{proj}.{leaf}", f"{FEEDFORWARD}.body.{{proj}}.{{leaf}}"),
    Link("model.final_norm.weight", "norm.weight"),
    Link("lm_head.weight", "head.weight"),
)


def spec(config: dict[str, Any]) -> Decoder:
    hf_config = Config("recurrent_gemma", config)
    hf_config.accept_only("embeddings_scale_by_sqrt_dim", True)
    norm = RMSNorm(hf_config.number("rms_norm_eps", 1e-6), around_one=True)
    activation = hf_config.activation("hidden_activation", "gelu_pytorch_tanh")
    mixers = {"recurrent": read_rg_lru(hf_config, activation), "attention": read_attention(hf_config)}
    feedforward = Gated(hf_config.integer("intermediate_size") // 2, activation, bias=True)
    types = hf_config.list_of(str, "block_types", ("recurrent", "recurrent", "attention"))
    if not types or not {*types} <= mixers.keys():
        raise hf_config.error("block_types", types, "must be a list of 'recurrent' and 'attention'")
    blocks = tuple(Block((Sublayer(mixers[name], norm), Sublayer(feedforward, norm))) for name in types)
    layers = repeat_blocks(blocks, hf_config.integer("num_hidden_layers"))
    model = read_decoder(hf_config, layers, norm, tied=True, context=None)
    return replace(
        model,
        embedding_scale=torch.tensor(model.width**0.5, dtype=torch.bfloat16).item(),
        softcap=hf_config.number("logits_soft_cap", 30.0),
    )


def read_attention(hf_config: Config) -> Attention:
    heads, position = hf_config.integer("num_attention_heads"), read_rope(hf_config, share=0.5)
    if position.scaling is not None:
        raise hf_config.error("rope_type", position.scaling.kind, "is not supported, only 'default' is")
    return Attention(
        heads=heads,
        kv_heads=hf_config.integer("num_key_value_heads", heads),
        position=position,
        mask=Window(hf_config.integer("attention_window_size", 2048)),
        bias=hf_config.flag("attention_bias", False),
        out_bias=True,
    )


def read_rg_lru(hf_config: Config, activation: Activation) -> RGLRU:
    heads, taps = hf_config.integer("num_attention_heads"), hf_config.integer("conv1d_width", 4)
    return RGLRU(heads, hidden=hf_config.integer_or_none("lru_width"), taps=taps, activation=activation)


def config(model: Decoder) -> dict[str, Any]:
    mixers, feedforwards = zip(*(bodies(block, Body, Gated) for block in model.blocks), strict=True)
    rg_lru = first_of_type(mixers, RGLRU, RGLRU(1))
    attention = first_of_type(mixers, Attention, Attention(rg_lru.heads, position=Rope(share=0.5), mask=Window(2048)))
    types = shortest_period(tuple("attention" if isinstance(mixer, Attention) else "recurrent" for mixer in mixers))
    settings = decoder_config("recurrent_gemma", "RecurrentGemmaForCausalLM", model) | {
        "intermediate_size": 2 * feedforwards[0].hidden_dim(model.width),
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.sizes(model.width)[1],
        "block_types": list(types),
        "attention_window_size": getattr(attention.mask, "size", 2048),
        "rope_parameters": rope_parameters(attention.position, share=0.5),
        "attention_bias": attention.bias,
        "lru_width": rg_lru.hidden,
        "conv1d_width": rg_lru.taps,
        "hidden_activation": ACTIVATION_NAMES[feedforwards[0].activation],
        "logits_soft_cap": model.softcap,
        "rms_norm_eps": getattr(model.norm, "eps", None),
    }
    return check_roundtrip("recurrent_gemma", model, settings, spec)


def table(model: Decoder) -> Table:
    names: dict[type, str] = {Attention: "temporal_block.o_proj", RGLRU: "temporal_block.linear_out"}
    return Table(*LINKS, *output_projections(model, names), ignored=("lm_head.weight",))
