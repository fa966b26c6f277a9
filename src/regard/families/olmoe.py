"""OLMoE (Muennighoff et al. 2024): Llama with norms over the queries and keys of all heads, and 64 small experts."""

from dataclasses import replace
from typing import Any

from regard.families.common import decoder
from regard.families.common.config_reader import Config, FamilyError
from regard.families.common.moe import EXPERTS, balance_per_layer, mixer_and_experts, routing_config
from regard.families.common.roundtrip import check_roundtrip
from regard.models.decoder import Decoder
from regard.parts.attention import Attention
from regard.parts.experts import Experts
from regard.parts.router import Router
from regard.weights.table import Table

DEFAULTS = {
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
    "router_aux_loss_coef": 0.01,
}
TABLE = decoder.make_table(*decoder.PROJECTIONS, *decoder.NORMS, *decoder.QK_NORMS, *EXPERTS)


def spec(config: dict[str, Any]) -> Decoder:
    hf_config = Config("olmoe", DEFAULTS | config)
    norm, clip = decoder.read_rms_norm(hf_config), hf_config.number_or_none("clip_qkv")
    attention = replace(decoder.read_attention(hf_config), qk_norm=norm, norm_over="all", clip=clip)
    experts = Experts(
        hf_config.integer("num_experts"),
        hf_config.integer("num_experts_per_tok"),
        decoder.read_swiglu(hf_config),
        router=Router(renormalize=hf_config.flag("norm_topk_prob")),
        balance=balance_per_layer(hf_config, hf_config.integer("num_hidden_layers")),
    )
    return decoder.read_decoder(hf_config, decoder.pre_norm_block(hf_config, attention, experts))


def config(model: Decoder) -> dict[str, Any]:
    attention, experts = mixer_and_experts(model, Attention)
    heads, _, head_dim = attention.sizes(model.width)
    if heads * head_dim != model.width:
        raise FamilyError(
            f"transformers' olmoe needs width = heads · head_dim, found width={model.width}, heads={heads}, "
            f"head_dim={head_dim}; change one of them"
        )
    settings = decoder.llama_config("olmoe", "OlmoeForCausalLM", model, attention, experts.expert) | {
        "attention_bias": attention.bias,
        "clip_qkv": attention.clip,
        "num_experts": experts.count,
        "norm_topk_prob": experts.router.renormalizes(experts.top_k),
        **routing_config(model, experts),
    }
    return check_roundtrip("olmoe", model, settings, spec)


def table(model: Decoder) -> Table:
    return TABLE
