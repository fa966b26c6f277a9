"""Jamba (Lieber et al. 2024): Mamba layers with attention every few layers and experts every few layers; no positions.

The low-rank Δ, B and C have norms. Periods and offsets determine the kind of each layer. Dropout is an option of
training and is not converted.
"""

import math
from typing import Any

from regard.families.common.config_reader import Config, FamilyError
from regard.families.common.decoder import decoder_config, read_decoder, read_swiglu
from regard.families.common.layer_types import first_of_type, output_projections
from regard.families.common.moe import expert_links
from regard.families.common.names import ATTENTION, FEEDFORWARD
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.families.mamba import mixer_links, read_rank
from regard.models.decoder import Decoder
from regard.models.stack import repeat_blocks
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.body import Body
from regard.parts.experts import Experts
from regard.parts.feedforward import SwiGLU
from regard.parts.norm import RMSNorm
from regard.parts.router import Router
from regard.parts.ssm.mamba import Mamba
from regard.parts.ssm.mamba2 import Mamba2
from regard.weights.table import Link, Table

IGNORED = ("lm_head.weight",)  # present in files of tied models
LONGEST_PERIOD = 256  # layers
LAYER = "model.layers.{i}"

LINKS = (
    Link("model.embed_tokens.weight", "embedding.weight"),
    Link(f"{LAYER}.input_layernorm.weight", f"{ATTENTION}.norm.weight"),
    *(Link(f"{LAYER}.self_attn.{p}_proj.{{leaf}}", f"{ATTENTION}.body.{p}_proj.{{leaf}}") for p in "qkv"),
    Link(f"{LAYER}.pre_ff_layernorm.weight", f"{FEEDFORWARD}.norm.weight"),
    Link(f"{LAYER}.feed_forward.{{proj}}.{{leaf}}", f"{FEEDFORWARD}.body.{{proj}}.{{leaf}}"),
    Link("model.final_layernorm.weight", "norm.weight"),
    Link("lm_head.weight", "head.weight"),
)  # Bamba has these names too
MAMBA_NORMS = tuple(
    Link(f"{LAYER}.mamba.{foreign}_layernorm.weight", f"{ATTENTION}.body.{ours}_norm.weight")
    for foreign, ours in {"dt": "rank", "b": "b", "c": "c"}.items()
)


def spec(config: dict[str, Any]) -> Decoder:
    hf_config = Config("jamba", config)
    norm = RMSNorm(hf_config.number("rms_norm_eps", 1e-6))
    attention = Attention(hf_config.integer("num_attention_heads"), hf_config.integer("num_key_value_heads", 8))
    mamba = Mamba(
        state=hf_config.integer("mamba_d_state", 16),
        expand=hf_config.integer("mamba_expand", 2),
        rank=read_rank(hf_config, "mamba_dt_rank"),
        taps=hf_config.integer("mamba_d_conv", 4),
        bias=hf_config.flag("mamba_proj_bias", False),
        conv_bias=hf_config.flag("mamba_conv_bias", True),
        norm=norm,
    )
    dense = read_swiglu(hf_config)
    count, feedforwards = hf_config.integer("num_experts", 16), [dense]
    if count != 1:
        top_k, balance = hf_config.integer("num_experts_per_tok", 2), hf_config.number("router_aux_loss_coef", 0.001)
        experts = Experts(count, top_k, dense, router=Router(renormalize=False), balance=balance)
        feedforwards = one_period(hf_config, "expert_layer", 2, 1, experts, dense)
    mixers = one_period(hf_config, "attn_layer", 8, 4, attention, mamba)
    period = math.lcm(len(mixers), len(feedforwards))
    pairs = zip(mixers * (period // len(mixers)), feedforwards * (period // len(feedforwards)), strict=True)
    blocks = tuple(Block((Sublayer(mixer, norm), Sublayer(feedforward, norm))) for mixer, feedforward in pairs)
    return read_decoder(hf_config, repeat_blocks(blocks, hf_config.integer("num_hidden_layers")), norm, context=262144)


def one_period(hf_config: Config, key: str, period: int, offset: int, body: Body, default: Body) -> list[Body]:
    """The bodies of one period of layers: `body` at the offset, `default` elsewhere."""
    period, offset = hf_config.integer(f"{key}_period", period), hf_config.integer(f"{key}_offset", offset)
    if not 0 <= offset < period <= LONGEST_PERIOD:
        raise FamilyError(
            f"{hf_config.model_type}: {key}_offset={offset} and {key}_period={period} must satisfy "
            f"0 <= offset < period <= {LONGEST_PERIOD}"
        )
    return [body if i == offset else default for i in range(period)]


def config(model: Decoder) -> dict[str, Any]:
    mixers, feedforwards = zip(*(bodies(block, Body, Body) for block in model.blocks), strict=True)
    attention, mamba = first_of_type(mixers, Attention, Attention(1)), first_of_type(mixers, Mamba, Mamba())
    dense = first_of_type(feedforwards, SwiGLU, SwiGLU())
    experts = first_of_type(feedforwards, Experts, Experts(1, 1, dense))
    settings = decoder_config("jamba", "JambaForCausalLM", model) | {
        "intermediate_size": first_of_type((experts.expert,), SwiGLU, dense).hidden_dim(model.width),
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.sizes(model.width)[1],
        **period_config("attn_layer", [isinstance(body, Attention) for body in mixers]),
        **mamba_sizes(mamba),
        "mamba_dt_rank": mamba.rank or "auto",
        "mamba_proj_bias": mamba.bias,
        "mamba_conv_bias": mamba.conv_bias,
        "num_experts": experts.count,
        "num_experts_per_tok": experts.top_k,
        "router_aux_loss_coef": experts.balance,
        **period_config("expert_layer", [isinstance(body, Experts) for body in feedforwards]),
        "hidden_act": "silu",
        "max_position_embeddings": model.context,
        "rms_norm_eps": getattr(model.norm, "eps", None),
    }
    return check_roundtrip("jamba", model, settings, spec)


def mamba_sizes(mamba: Mamba | Mamba2) -> dict[str, Any]:
    """The keys that all hybrids with Mamba or Mamba-2 have."""
    return {"mamba_d_state": mamba.state, "mamba_expand": mamba.expand, "mamba_d_conv": mamba.taps}


def period_config(key: str, present: list[bool]) -> dict[str, int]:
    """The period and offset of the layers in which a body is present; if in none, an offset after the last layer."""
    layers = [i for i, is_present in enumerate(present) if is_present] or [len(present)]
    period = layers[1] - layers[0] if len(layers) > 1 else max(len(present), layers[0] + 1)
    return {f"{key}_period": period, f"{key}_offset": layers[0] % period}


def table(model: Decoder) -> Table:
    links = *LINKS, *mixer_links(f"{LAYER}.mamba", f"{ATTENTION}.body"), *MAMBA_NORMS
    outputs = output_projections(model, {Attention: "self_attn.o_proj", Mamba: "mamba.out_proj"})
    return Table(*links, *expert_links(f"{LAYER}.feed_forward", "router"), *outputs, ignored=IGNORED)
