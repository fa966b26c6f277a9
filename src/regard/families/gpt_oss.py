"""GPT-OSS (OpenAI 2025): windows in every other layer, one learned sink per head, biases everywhere, and experts.

One tensor holds the gate and up columns of all experts, interleaved. Both products are clamped to a limit, 1 is added
to up, and the activation of the gate is x · sigmoid(1.702 x).
"""

from dataclasses import replace
from typing import Any

from regard.families.common import decoder
from regard.families.common.config_reader import Config
from regard.families.common.layer_types import FULL, SLIDING, attention_by_type, tile_by_type, window_config
from regard.families.common.moe import balance_per_layer, mixer_and_experts, routing_config
from regard.families.common.names import ATTENTION, FEEDFORWARD
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.models.decoder import Decoder
from regard.parts.attention import Attention
from regard.parts.body import Body
from regard.parts.experts import Experts
from regard.parts.feedforward import Gated
from regard.parts.router import Router
from regard.weights.ops import Split, Transpose
from regard.weights.table import Link, Table

YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
DEFAULTS = {
    "head_dim": 64,
    "num_key_value_heads": 8,
    "attention_bias": True,
    "sliding_window": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "swiglu_limit": 7.0,
    "router_aux_loss_coef": 0.001,
}


def spec(config: dict[str, Any]) -> Decoder:
    rope = {"rope_parameters": YARN} if config.get("rope_parameters") is None else {}
    hf_config = Config("gpt_oss", DEFAULTS | config | rope)
    hf_config.accept_only("swiglu_alpha", 1.702)
    hidden, limit = hf_config.integer("intermediate_size"), hf_config.number("swiglu_limit")
    experts = Experts(
        hf_config.integer("num_local_experts"),
        hf_config.integer("num_experts_per_tok"),
        Gated(hidden, "quick_gelu", bias=True, limit=limit, offset=1.0),
        router=Router(renormalize=True, bias=True),
        balance=balance_per_layer(hf_config, hf_config.integer("num_hidden_layers")),
    )
    attentions = attention_by_type(hf_config, replace(decoder.read_attention(hf_config), sinks=True))
    blocks = {kind: decoder.pre_norm_block(hf_config, attention, experts) for kind, attention in attentions.items()}
    return decoder.read_decoder(hf_config, tile_by_type(hf_config, blocks, (SLIDING, FULL)))


def config(model: Decoder) -> dict[str, Any]:
    attention, experts = mixer_and_experts(model, Attention)
    attentions = [bodies(block, Attention, Body)[0] for block in model.blocks]
    settings = decoder.llama_config("gpt_oss", "GptOssForCausalLM", model, attention, experts.expert) | {
        "attention_bias": attention.bias,
        **window_config(attentions, default=128),
        "num_local_experts": experts.count,
        "hidden_act": "silu",  # the class does not use it
        "swiglu_limit": getattr(experts.expert, "limit", None),
        **routing_config(model, experts),
    }
    return check_roundtrip("gpt_oss", model, settings, spec)


def table(model: Decoder) -> Table:
    _, experts = mixer_and_experts(model, Attention)
    interleaved = Split(dim=1, groups=experts.expert.hidden_dim(model.width))
    foreign, ours = f"{decoder.LAYER}.mlp.experts", f"{FEEDFORWARD}.body.experts"
    weights, biases = ((f"{ours}.gate_proj.{leaf}", f"{ours}.up_proj.{leaf}") for leaf in ("weight", "bias"))
    return decoder.make_table(
        decoder.ATTENTION_PROJECTIONS,
        *decoder.NORMS,
        Link(f"{decoder.LAYER}.self_attn.sinks", f"{ATTENTION}.body.sinks"),
        Link(f"{decoder.LAYER}.mlp.router.{{leaf}}", f"{FEEDFORWARD}.body.router.proj.{{leaf}}"),
        Link(f"{foreign}.gate_up_proj", weights, Transpose(), interleaved),
        Link(f"{foreign}.gate_up_proj_bias", biases, interleaved),
        Link(f"{foreign}.down_proj", f"{ours}.down_proj.weight", Transpose()),
        Link(f"{foreign}.down_proj_bias", f"{ours}.down_proj.bias"),
    )
