"""Switch Transformer (Fedus et al. 2021): T5 with experts in every so-many-th layer, of which a token takes one.

A layer has experts where i mod step = 1. transformers drops a text's tokens past expert_capacity for an expert even
when it only reads; ours drops none, so the two agree where nothing is dropped, and an export allows any number.
"""

import sys
from typing import Any

from regard.families import t5
from regard.families.common.activations import OURS, THEIRS
from regard.families.common.config_reader import Config, FamilyError
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
    "num_sparse_decoder_layers": 3, "num_heads": 12, "num_experts": 8, "router_bias": False,
    "router_jitter_noise": 0.01, "router_z_loss_coef": 0.001, "router_aux_loss_coef": 0.001, "dense_act_fn": "relu",
}  # fmt: skip
LONGEST_STEP = 1000
NONE = Experts(1, 1, FeedForward(1))  # what is said of experts where there are none


def spec(config: dict[str, Any]) -> EncoderDecoder:
    theirs = Config("switch_transformers", DEFAULTS | config)
    theirs.only("router_dtype", "float32")
    read = tile(theirs, "encoder", theirs.integer("num_layers"))
    write = tile(theirs, "decoder", theirs.integer("num_decoder_layers", theirs.integer("num_layers")))
    return t5.stacks(theirs, read, write, scaled=True, shared=theirs.flag("tie_word_embeddings"))


def tile(theirs: Config, stack: str, layers: int) -> t5.Bodies:
    """The feed-forwards of the first layers of a stack, up to where they repeat."""
    dense = FeedForward(theirs.integer("d_ff"), theirs.choice("dense_act_fn", OURS), bias=False)
    router = Router(bias=theirs.flag("router_bias"), jitter=theirs.number("router_jitter_noise"))
    balance, z = theirs.number("router_aux_loss_coef"), theirs.number("router_z_loss_coef")
    sparse = Experts(theirs.integer("num_experts"), 1, dense, router=router, balance=balance, z=z)
    several = theirs.integer(f"num_sparse_{stack}_layers")
    step = theirs.integer(f"{stack}_sparse_step", layers // several if several > 0 else layers)
    if step > LONGEST_STEP:
        raise FamilyError(f"switch_transformers: {stack}_sparse_step={step} is more than {LONGEST_STEP}")
    if step < 2:
        return (sparse,) if step == 1 else (dense,)
    return (dense, sparse, *[dense] * (step - 2))


def config(model: EncoderDecoder) -> dict[str, Any]:
    settings = t5.settings(model)
    stacks = {"encoder": model.source.blocks, "decoder": model.target.blocks}
    last = [block.sublayers[-1].body for blocks in stacks.values() for block in blocks]
    sparse = next((body for body in last if isinstance(body, Experts)), NONE)
    dense = require_type(sparse.expert if sparse in last else last[0], FeedForward)
    written = {
        "model_type": "switch_transformers",
        "architectures": ["SwitchTransformersForConditionalGeneration"],
        **settings,
        "d_ff": dense.hidden_dim(model.target.width),
        "dense_act_fn": THEIRS[dense.activation],
        "num_experts": sparse.count,
        "expert_capacity": sys.maxsize,
        "router_bias": sparse.router.bias,
        "router_jitter_noise": sparse.router.jitter,
        "router_aux_loss_coef": sparse.balance,
        "router_z_loss_coef": sparse.z,
    }
    for name, blocks in stacks.items():
        written[f"{name}_sparse_step"] = step = step_of(blocks)
        written[f"num_sparse_{name}_layers"] = len(blocks) // step if step else 0
    return check_roundtrip("switch_transformers", model, written, spec)


def step_of(blocks: list[Block]) -> int:
    """How far apart the layers with experts are; 0: there are none."""
    places = [i for i, block in enumerate(blocks) if isinstance(block.sublayers[-1].body, Experts)]
    if len(places) < 2:
        return len(blocks) if places else 0
    return places[1] - places[0]


def table(model: EncoderDecoder) -> Table:
    shared = Link("shared.weight", "source.input.table.weight")
    own = Link(t5.TABLES[0], "source.input.table.weight"), Link(t5.TABLES[1], "target.embedding.weight")
    return Table(
        *((shared,) if model.shared else own),
        *t5.links("encoder", "source", "mlp", {"up_proj": "wi"}),
        *t5.links("decoder", "target", "mlp", {"up_proj": "wi"}),
        t5.CROSS,
        *experts("encoder", "source"),
        *experts("decoder", "target"),
        Link("lm_head.weight", "target.head.weight"),
        derived=dict.fromkeys((*t5.TABLES, "lm_head.weight") if model.shared else t5.TABLES, "shared.weight"),
        ignored=() if model.shared else ("shared.weight",),
    )


def experts(theirs: str, ours: str) -> list[Link]:
    block, sublayers = f"{theirs}.block.{{i}}.layer.{{n}}.mlp", f"{ours}.stack.blocks.{{i}}.sublayers.{{n}}.body"
    return [
        Link(f"{block}.router.classifier.{{leaf}}", f"{sublayers}.router.proj.{{leaf}}"),
        Link(f"{block}.experts.expert_{{each}}.wi.weight", f"{sublayers}.experts.up_proj.weight", StackTensors()),
        Link(f"{block}.experts.expert_{{each}}.wo.weight", f"{sublayers}.experts.down_proj.weight", StackTensors()),
    ]
