"""OLMoE (Muennighoff et al. 2024): Llama with a norm over all queries and over all keys, and 64 small experts."""

from dataclasses import replace
from typing import Any

from regard.families import llama
from regard.families.common.config_reader import Config, FamilyError
from regard.families.common.moe import EXPERTS, balance, routed, sparse
from regard.families.common.roundtrip import check_roundtrip
from regard.families.llama import ENDS, IGNORED, NORMS, PROJECTIONS, QK_NORMS
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
TABLE = Table(*ENDS, *PROJECTIONS, *NORMS, *QK_NORMS, *EXPERTS, ignored=IGNORED)


def spec(config: dict[str, Any]) -> Decoder:
    theirs = Config("olmoe", DEFAULTS | config)
    clip = theirs.number("clip_qkv") if theirs.has("clip_qkv") else None
    mixer = replace(llama.attention(theirs), qk_norm=llama.norm(theirs), norm_over="all", clip=clip)
    experts = Experts(
        theirs.integer("num_experts"),
        theirs.integer("num_experts_per_tok"),
        llama.feedforward(theirs),
        router=Router(renormalize=theirs.flag("norm_topk_prob")),
        balance=balance(theirs, theirs.integer("num_hidden_layers")),
    )
    return llama.decoder(theirs, llama.pre(theirs, mixer, experts))


def config(model: Decoder) -> dict[str, Any]:
    mixer, experts = sparse(model, Attention)
    heads, _, head_dim = mixer.sizes(model.width)
    if heads * head_dim != model.width:
        raise FamilyError(f"an olmoe model has heads · head_dim = width, not {heads} · {head_dim} = {model.width}")
    own = {
        "attention_bias": mixer.bias,
        "clip_qkv": mixer.clip,
        "num_experts": experts.count,
        "norm_topk_prob": experts.router.renormalizes(experts.top_k),
        **routed(model, experts),
    }
    written = llama.written("OlmoeForCausalLM", "olmoe", model, mixer, experts.expert) | own
    return check_roundtrip("olmoe", model, written, spec)


def table(model: Decoder) -> Table:
    return TABLE
