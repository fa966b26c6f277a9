"""Switch Transformer (Fedus et al. 2021): T5 with experts in every n-th layer, of which each token uses one.

A layer has experts where i mod n = 1. transformers drops tokens at inference too: an expert processes at most
`expert_capacity` tokens of a sequence per forward, so its cached decoding differs from one forward. Here no token is
dropped at inference (parts/experts.py). The two are equal for sequences of at most `expert_capacity` tokens; a warning
reports this, and an exported config has no limit.
"""

import sys
import warnings
from typing import Any

from regard.families import t5
from regard.families.common.config_reader import ACTIVATION_NAMES, Config
from regard.families.common.roundtrip import check_roundtrip, require_type
from regard.models.encoder_decoder import EncoderDecoder
from regard.parts.block import Block
from regard.parts.experts import Experts
from regard.parts.feedforward import FeedForward
from regard.parts.router import Router
from regard.weights.ops import StackTensors
from regard.weights.table import Link, Table

DEFAULTS = t5.DEFAULTS | {
    "d_model": 768, "num_layers": 12, "num_sparse_encoder_layers": 3, "num_decoder_layers": 12,
    "num_sparse_decoder_layers": 3, "num_heads": 12, "num_experts": 8, "expert_capacity": 64, "router_bias": False,
    "router_jitter_noise": 0.01, "router_z_loss_coef": 0.001, "router_aux_loss_coef": 0.001, "dense_act_fn": "relu",
}  # fmt: skip
LONGEST_STEP = 1000
NO_LIMIT = sys.maxsize  # tokens per expert
PLACEHOLDER = Experts(1, 1, FeedForward(1))  # its settings are written for a model without experts


def spec(config: dict[str, Any]) -> EncoderDecoder:
    hf_config = Config("switch_transformers", DEFAULTS | config)
    hf_config.accept_only("router_dtype", "float32")
    capacity = hf_config.integer("expert_capacity")
    if capacity < NO_LIMIT:
        warnings.warn(
            f"switch_transformers: expert_capacity={capacity} is not applied: no token is dropped at inference. In "
            f"transformers, sequences of more than {capacity} tokens can therefore have other outputs",
            stacklevel=4,
        )
    layers, tied = hf_config.integer("num_layers"), hf_config.flag("tie_word_embeddings")
    encoder = one_period(hf_config, "encoder", layers)
    decoder = one_period(hf_config, "decoder", hf_config.integer("num_decoder_layers", layers))
    return t5.read_t5(hf_config, encoder, decoder, scaled=tied, shared=tied)


def one_period(hf_config: Config, stack: str, layers: int) -> t5.FeedForwards:
    """The feed-forwards of the first layers of a stack, which repeat over its depth."""
    dense = FeedForward(hf_config.integer("d_ff"), hf_config.activation("dense_act_fn"), bias=False)
    router = Router(bias=hf_config.flag("router_bias"), jitter=hf_config.number("router_jitter_noise"))
    balance, z = hf_config.number("router_aux_loss_coef"), hf_config.number("router_z_loss_coef")
    sparse = Experts(hf_config.integer("num_experts"), 1, dense, router=router, balance=balance, z=z)
    count = hf_config.integer(f"num_sparse_{stack}_layers")
    step = hf_config.integer(f"{stack}_sparse_step", layers // count if count > 0 else layers)
    if step > LONGEST_STEP:
        raise hf_config.error(f"{stack}_sparse_step", step, f"must be at most {LONGEST_STEP}")
    if step < 2:
        return (sparse,) if step == 1 else (dense,)
    return (dense, sparse, *[dense] * (step - 2))


def config(model: EncoderDecoder) -> dict[str, Any]:
    settings = t5.common_config("switch_transformers", "SwitchTransformersForConditionalGeneration", model)
    stacks = {"encoder": model.source.blocks, "decoder": model.target.blocks}
    feedforwards = [block.sublayers[-1].body for blocks in stacks.values() for block in blocks]
    sparse = next((body for body in feedforwards if isinstance(body, Experts)), PLACEHOLDER)
    dense = require_type(sparse.expert if sparse in feedforwards else feedforwards[0], FeedForward)
    settings |= {
        "d_ff": dense.hidden_dim(model.target.width),
        "dense_act_fn": ACTIVATION_NAMES[dense.activation],
        "num_experts": sparse.count,
        "expert_capacity": NO_LIMIT,
        "router_bias": sparse.router.bias,
        "router_jitter_noise": sparse.router.jitter,
        "router_aux_loss_coef": sparse.balance,
        "router_z_loss_coef": sparse.z,
    }
    for stack, blocks in stacks.items():
        settings[f"{stack}_sparse_step"] = step = sparse_step(blocks)
        settings[f"num_sparse_{stack}_layers"] = len(blocks) // step if step else 0
    return check_roundtrip("switch_transformers", model, settings, spec)


def sparse_step(blocks: list[Block]) -> int:
    """The distance between layers with experts; 0: there are none."""
    layers = [i for i, block in enumerate(blocks) if isinstance(block.sublayers[-1].body, Experts)]
    if len(layers) < 2:
        return len(blocks) if layers else 0
    return layers[1] - layers[0]


def table(model: EncoderDecoder) -> Table:
    shared = Link("shared.weight", "source.input.table.weight")
    separate = Link(t5.EMBEDDINGS[0], "source.input.table.weight"), Link(t5.EMBEDDINGS[1], "target.embedding.weight")
    copies = (*t5.EMBEDDINGS, "lm_head.weight") if model.shared else t5.EMBEDDINGS
    return Table(
        *((shared,) if model.shared else separate),
        *t5.stack_links("mlp", {"up_proj": "wi"}),
        *(link for stack, ours in t5.STACKS.items() for link in expert_links(stack, ours)),
        Link("lm_head.weight", "target.head.weight"),
        derived=dict.fromkeys(copies, "shared.weight"),
        ignored=() if model.shared else ("shared.weight",),
    )


def expert_links(stack: str, ours: str) -> list[Link]:
    mlp, body = f"{stack}.block.{{i}}.layer.{{n}}.mlp", f"{ours}.stack.blocks.{{i}}.sublayers.{{n}}.body"
    return [
        Link(f"{mlp}.router.classifier.{{leaf}}", f"{body}.router.proj.{{leaf}}"),
        Link(f"{mlp}.experts.expert_{{each}}.wi.weight", f"{body}.experts.up_proj.weight", StackTensors()),
        Link(f"{mlp}.experts.expert_{{each}}.wo.weight", f"{body}.experts.down_proj.weight", StackTensors()),
    ]
