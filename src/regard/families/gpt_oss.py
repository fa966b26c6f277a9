"""GPT-OSS (OpenAI 2025): windows in every other layer, a learned sink a head, biases everywhere, and experts.

Gate and up take turns in the columns of one tensor for all experts. Both are kept within a limit, up has one added, and
the gate's activation is x · sigmoid(1.702 x).
"""

from dataclasses import replace
from typing import Any

from regard.families import llama
from regard.families.common.config_reader import Config
from regard.families.common.layer_types import FULL, SLIDING, arranged, by_window, layer_types, listed, window
from regard.families.common.moe import balance, routed, sparse
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.families.llama import ATTENTION, ENDS, FEEDFORWARD, IGNORED, LAYER, NORMS, PROJECTIONS
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
    "rope_scaling": YARN,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "swiglu_limit": 7.0,
    "router_aux_loss_coef": 0.001,
}


def spec(config: dict[str, Any]) -> Decoder:
    theirs = Config("gpt_oss", DEFAULTS | config)
    theirs.only("swiglu_alpha", 1.702)
    expert = Gated(
        theirs.integer("intermediate_size"), "quick_gelu", bias=True, limit=theirs.number("swiglu_limit"), offset=1.0
    )
    experts = Experts(
        theirs.integer("num_local_experts"),
        theirs.integer("num_experts_per_tok"),
        expert,
        router=Router(renormalize=True, bias=True),
        balance=balance(theirs, theirs.integer("num_hidden_layers")),
    )
    mixers = by_window(theirs, replace(llama.attention(theirs), sinks=True))
    blocks = {kind: llama.pre(theirs, mixer, experts) for kind, mixer in mixers.items()}
    return llama.decoder(theirs, arranged(theirs, blocks, listed(theirs, "layer_types", str, (SLIDING, FULL))))


def config(model: Decoder) -> dict[str, Any]:
    mixer, experts = sparse(model, Attention)
    mixers = [bodies(block, Attention, Body)[0] for block in model.blocks]
    own = {
        "attention_bias": mixer.bias,
        "sliding_window": window(mixers) or DEFAULTS["sliding_window"],
        "layer_types": layer_types(mixers),
        "num_local_experts": experts.count,
        "hidden_act": "silu",  # not asked
        "swiglu_limit": getattr(experts.expert, "limit", None),
        **routed(model, experts),
    }
    written = llama.written("GptOssForCausalLM", "gpt_oss", model, mixer, experts.expert) | own
    return check_roundtrip("gpt_oss", model, written, spec)


def table(model: Decoder) -> Table:
    _, experts = sparse(model, Attention)
    turns = Split(dim=1, groups=experts.expert.hidden_dim(model.width))
    theirs, ours = f"{LAYER}.mlp.experts", f"{FEEDFORWARD}.body.experts"
    weights, biases = ((f"{ours}.gate_proj.{leaf}", f"{ours}.up_proj.{leaf}") for leaf in ("weight", "bias"))
    return Table(
        *ENDS,
        *PROJECTIONS[:1],
        *NORMS,
        Link(f"{LAYER}.self_attn.sinks", f"{ATTENTION}.body.sinks"),
        Link(f"{LAYER}.mlp.router.{{leaf}}", f"{FEEDFORWARD}.body.router.proj.{{leaf}}"),
        Link(f"{theirs}.gate_up_proj", weights, Transpose(), turns),
        Link(f"{theirs}.gate_up_proj_bias", biases, turns),
        Link(f"{theirs}.down_proj", f"{ours}.down_proj.weight", Transpose()),
        Link(f"{theirs}.down_proj_bias", f"{ours}.down_proj.bias"),
        ignored=IGNORED,
    )
