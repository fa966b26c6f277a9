"""Mixtral (Jiang et al. 2024): Mistral with eight experts in every layer, two of which a token passes through."""

from dataclasses import replace
from typing import Any

from regard.families import llama
from regard.families.common.config_reader import Config
from regard.families.common.layer_types import SLIDING, by_window, window
from regard.families.common.moe import balance, routed, sparse
from regard.families.common.roundtrip import check_roundtrip
from regard.families.llama import ENDS, FEEDFORWARD, IGNORED, LAYER, NORMS, PROJECTIONS
from regard.models.decoder import Decoder
from regard.parts.attention import Attention
from regard.parts.experts import Experts
from regard.parts.router import Router
from regard.weights.ops import StackTensors
from regard.weights.table import Link, Table

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
MOE = f"{LAYER}.block_sparse_moe"
TABLE = Table(
    *ENDS,
    *PROJECTIONS,
    *NORMS,
    Link(f"{MOE}.gate.weight", f"{FEEDFORWARD}.body.router.proj.weight"),
    *(
        Link(f"{MOE}.experts.{{each}}.{theirs}.weight", f"{FEEDFORWARD}.body.experts.{ours}.weight", StackTensors())
        for theirs, ours in NAMES.items()
    ),
    ignored=IGNORED,
)


def spec(config: dict[str, Any]) -> Decoder:
    theirs = Config("mixtral", DEFAULTS | config)
    mixer = replace(llama.attention(theirs), bias=False)
    mixer = by_window(theirs, mixer).get(SLIDING, mixer)
    experts = Experts(
        theirs.integer("num_local_experts"),
        theirs.integer("num_experts_per_tok"),
        llama.feedforward(theirs),
        router=Router(renormalize=True),
        balance=balance(theirs, theirs.integer("num_hidden_layers")),
    )
    return llama.decoder(theirs, llama.pre(theirs, mixer, experts))


def config(model: Decoder) -> dict[str, Any]:
    mixer, experts = sparse(model, Attention)
    own = {"num_local_experts": experts.count, "sliding_window": window([mixer]), **routed(model, experts)}
    written = llama.written("MixtralForCausalLM", "mixtral", model, mixer, experts.expert) | own
    return check_roundtrip("mixtral", model, written, spec)


def table(model: Decoder) -> Table:
    return TABLE
