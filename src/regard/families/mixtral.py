"""Mixtral (Jiang et al. 2024): Mistral with eight experts per layer, two of which process each token."""

from dataclasses import replace
from typing import Any

from regard.families.common import decoder
from regard.families.common.config_reader import Config
from regard.families.common.layer_types import window_size
from regard.families.common.moe import balance_per_layer, expert_links, mixer_and_experts, routing_config
from regard.families.common.roundtrip import check_roundtrip
from regard.families.mistral import read_windowed
from regard.models.decoder import Decoder
from regard.parts.attention import Attention
from regard.parts.experts import Experts
from regard.parts.router import Router
from regard.weights.table import Table

DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.001,
}
NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
EXPERTS = expert_links(f"{decoder.LAYER}.block_sparse_moe", names=NAMES)
TABLE = decoder.make_table(decoder.ATTENTION_PROJECTIONS, *decoder.NORMS, *EXPERTS)


def spec(config: dict[str, Any]) -> Decoder:
    hf_config = Config("mixtral", DEFAULTS | config)
    attention = read_windowed(hf_config, replace(decoder.read_attention(hf_config), bias=False))
    experts = Experts(
        hf_config.integer("num_local_experts"),
        hf_config.integer("num_experts_per_tok"),
        decoder.read_swiglu(hf_config),
        router=Router(renormalize=True),
        balance=balance_per_layer(hf_config, hf_config.integer("num_hidden_layers")),
    )
    return decoder.read_decoder(hf_config, decoder.pre_norm_block(hf_config, attention, experts))


def config(model: Decoder) -> dict[str, Any]:
    attention, experts = mixer_and_experts(model, Attention)
    settings = decoder.llama_config("mixtral", "MixtralForCausalLM", model, attention, experts.expert) | {
        "num_local_experts": experts.count,
        "sliding_window": window_size([attention]),
        **routing_config(model, experts),
    }
    return check_roundtrip("mixtral", model, settings, spec)


def table(model: Decoder) -> Table:
    return TABLE
