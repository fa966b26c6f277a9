"""Qwen2-MoE (Yang et al. 2024): Qwen2 with routed experts and one gated shared expert.

Dense layers are those in `mlp_only_layers`, and all but every n-th layer (`decoder_sparse_step`).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from regard.families.common import decoder
from regard.families.common.config_reader import Config
from regard.families.common.layer_types import FULL, SLIDING, layer_interval, layer_list, tile_blocks
from regard.families.common.moe import EXPERTS, balance_per_layer, dense_layers, mixer_and_experts, routing_config
from regard.families.common.names import FEEDFORWARD
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.families.qwen2 import optional_window_config, read_optional_windows
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.body import Body
from regard.parts.experts import Experts
from regard.parts.feedforward import SwiGLU
from regard.parts.router import Router
from regard.weights.table import Link, Table

DEFAULTS = {
    "num_key_value_heads": 16,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,  # only layers below this index have a window, and of these every second
    "qkv_bias": True,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "norm_topk_prob": False,
    "router_aux_loss_coef": 0.001,
}
MAX_DEPTH = 1024  # the layers are enumerated, and a config may claim any number
SHARED = (
    Link(f"{decoder.LAYER}.mlp.shared_expert.{{proj}}.weight", f"{FEEDFORWARD}.body.shared.{{proj}}.weight"),
    Link(f"{decoder.LAYER}.mlp.shared_expert_gate.weight", f"{FEEDFORWARD}.body.shared_gate.weight"),
)
TABLE = decoder.make_table(*decoder.PROJECTIONS, *decoder.NORMS, *EXPERTS, *SHARED)


def spec(config: dict[str, Any]) -> Decoder:
    hf_config = Config("qwen2_moe", DEFAULTS | config)
    attention = replace(decoder.read_attention(hf_config), bias=hf_config.flag("qkv_bias"), out_bias=False)
    attentions = read_optional_windows(hf_config, attention)
    windows = hf_config.integer("max_window_layers") if SLIDING in attentions else 0
    default = tuple(SLIDING if n % 2 == 0 and n < windows else FULL for n in range(read_depth(hf_config)))
    kinds = layer_list(hf_config, "layer_types", str, default)
    shared = SwiGLU(hf_config.integer("shared_expert_intermediate_size"))
    experts = replace(read_experts(hf_config), shared=shared, shared_gate=True)
    return decoder.read_decoder(hf_config, read_layers(hf_config, attentions, kinds, experts))


def config(model: Decoder) -> dict[str, Any]:
    attention, experts = mixer_and_experts(model, Attention)
    attentions = [bodies(block, Attention, Body)[0] for block in model.blocks]
    settings = (
        common_config("qwen2_moe", "Qwen2MoeForCausalLM", model)
        | optional_window_config(attentions)
        | {
            "qkv_bias": attention.bias,
            "shared_expert_intermediate_size": experts.shared.hidden_dim(model.width) if experts.shared else 0,
        }
    )
    return check_roundtrip("qwen2_moe", model, settings, spec)


def table(model: Decoder) -> Table:
    return TABLE


def read_depth(hf_config: Config) -> int:
    found = hf_config.integer("num_hidden_layers")
    if not 0 < found <= MAX_DEPTH:
        raise hf_config.error("num_hidden_layers", found, f"must be from 1 to {MAX_DEPTH}")
    return found


def read_experts(hf_config: Config) -> Experts:
    return Experts(
        hf_config.integer("num_local_experts", hf_config.integer("num_experts")),
        hf_config.integer("num_experts_per_tok"),
        SwiGLU(hf_config.integer("moe_intermediate_size")),
        router=Router(renormalize=hf_config.flag("norm_topk_prob")),
    )


def read_layers(
    hf_config: Config, attentions: Mapping[str, Attention], kinds: tuple[str, ...], experts: Experts
) -> tuple[Repeat, ...]:
    """Layers with attention of these kinds; every n-th has experts, except those in `mlp_only_layers`."""
    dense, step = {*hf_config.list_of(int, "mlp_only_layers", ())}, layer_interval(hf_config, "decoder_sparse_step", 1)
    sparse = [n not in dense and (n + 1) % step == 0 for n in range(read_depth(hf_config))]
    experts = replace(experts, balance=balance_per_layer(hf_config, sum(sparse)))
    feedforwards = {False: decoder.read_swiglu(hf_config), True: experts}
    blocks = {
        (kind, has_experts): decoder.pre_norm_block(hf_config, attention, feedforward)
        for kind, attention in attentions.items()
        for has_experts, feedforward in feedforwards.items()
    }
    return tile_blocks(hf_config, blocks, tuple(zip(kinds, sparse, strict=True)))


def common_config(model_type: str, architecture: str, model: Decoder) -> dict[str, Any]:
    """The keys that Qwen2-MoE and Qwen3-MoE have."""
    (attention, experts), dense = mixer_and_experts(model, Attention), dense_layers(model)
    feedforward = bodies(model.blocks[dense[0]], Attention, SwiGLU)[1] if dense else experts.expert
    return decoder.llama_config(model_type, architecture, model, attention, feedforward) | {
        "num_experts": experts.count,
        "moe_intermediate_size": experts.expert.hidden_dim(model.width),
        "norm_topk_prob": experts.router.renormalizes(experts.top_k),
        "mlp_only_layers": dense,
        **routing_config(model, experts),
    }
