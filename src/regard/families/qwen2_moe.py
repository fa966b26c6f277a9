"""Qwen2-MoE (Yang et al. 2024): Qwen2 with experts, beside one that every token passes, as much as its gate lets it.

Some layers may be dense: those that are listed, and all but every so-many-th.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from regard.families import llama
from regard.families.common.config_reader import Config, FamilyError
from regard.families.common.layer_types import FULL, SLIDING, arranged, by_window, every, layer_types, listed, window
from regard.families.common.moe import EXPERTS, balance, dense, routed, sparse
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.families.llama import ENDS, FEEDFORWARD, IGNORED, LAYER, NORMS, PROJECTIONS
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
    "max_window_layers": 28,  # above them there is no window
    "qkv_bias": True,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "norm_topk_prob": False,
    "router_aux_loss_coef": 0.001,
}
DEEPEST = 1024  # layers of which each is looked at; a config may claim any number
SHARED = (
    Link(f"{LAYER}.mlp.shared_expert.{{proj}}.weight", f"{FEEDFORWARD}.body.shared.{{proj}}.weight"),
    Link(f"{LAYER}.mlp.shared_expert_gate.weight", f"{FEEDFORWARD}.body.shared_gate.weight"),
)
TABLE = Table(*ENDS, *PROJECTIONS, *NORMS, *EXPERTS, *SHARED, ignored=IGNORED)


def spec(config: dict[str, Any]) -> Decoder:
    theirs = Config("qwen2_moe", DEFAULTS | config)
    mixer = replace(llama.attention(theirs), bias=theirs.flag("qkv_bias"), out_bias=False)
    mixers = by_window(theirs, mixer) if theirs.flag("use_sliding_window") else {FULL: mixer}
    windows = theirs.integer("max_window_layers") if SLIDING in mixers else 0
    usual = tuple(SLIDING if n % 2 == 0 and n < windows else FULL for n in range(depth(theirs)))
    kinds = listed(theirs, "layer_types", str, usual)
    shared = SwiGLU(theirs.integer("shared_expert_intermediate_size"))
    inner = replace(experts(theirs), shared=shared, shared_gate=True)
    return llama.decoder(theirs, layers(theirs, mixers, kinds, inner))


def config(model: Decoder) -> dict[str, Any]:
    mixer, inner = sparse(model, Attention)
    mixers = [bodies(block, Attention, Body)[0] for block in model.blocks]
    own = {
        "use_sliding_window": window(mixers) is not None,
        "sliding_window": window(mixers),
        "layer_types": layer_types(mixers),
        "qkv_bias": mixer.bias,
        "shared_expert_intermediate_size": inner.shared.hidden_dim(model.width) if inner.shared else 0,
    }
    return check_roundtrip("qwen2_moe", model, written("Qwen2MoeForCausalLM", "qwen2_moe", model) | own, spec)


def table(model: Decoder) -> Table:
    return TABLE


def depth(theirs: Config) -> int:
    found = theirs.integer("num_hidden_layers")
    if not 0 < found <= DEEPEST:
        raise FamilyError(f"{theirs.model_type}: num_hidden_layers={found} should be from 1 to {DEEPEST}")
    return found


def experts(theirs: Config) -> Experts:
    return Experts(
        theirs.integer("num_local_experts", theirs.integer("num_experts")),
        theirs.integer("num_experts_per_tok"),
        SwiGLU(theirs.integer("moe_intermediate_size")),
        router=Router(renormalize=theirs.flag("norm_topk_prob")),
    )


def layers(
    theirs: Config, mixers: Mapping[str, Attention], kinds: tuple[str, ...], experts: Experts
) -> tuple[Repeat, ...]:
    """Attention of these kinds; with experts every so many layers, but for those that are listed."""
    without, step = {*theirs.each("mlp_only_layers", int, ())}, every(theirs, "decoder_sparse_step", 1)
    has = [n not in without and (n + 1) % step == 0 for n in range(depth(theirs))]
    inner = {False: llama.feedforward(theirs), True: replace(experts, balance=balance(theirs, sum(has)))}
    blocks = {(kind, h): llama.pre(theirs, mixer, inner[h]) for kind, mixer in mixers.items() for h in inner}
    return arranged(theirs, blocks, tuple(zip(kinds, has, strict=True)))


def written(architecture: str, model_type: str, model: Decoder) -> dict[str, Any]:
    """What both Qwens with experts have words for."""
    (mixer, experts), without = sparse(model, Attention), dense(model)
    inner = bodies(model.blocks[without[0]], Attention, SwiGLU)[1] if without else experts.expert
    return llama.written(architecture, model_type, model, mixer, inner) | {
        "num_experts": experts.count,
        "moe_intermediate_size": experts.expert.hidden_dim(model.width),
        "norm_topk_prob": experts.router.renormalizes(experts.top_k),
        "mlp_only_layers": without,
        **routed(model, experts),
    }
