"""Mamba-2 (Dao & Gu 2024): nothing but state spaces of one rate a head, an RMSNorm before each.

One projection of theirs holds the gate, what goes in, B, C and Δ. How Δ is drawn at first is a choice of training and
is not taken over.
"""

import math
from typing import Any

from regard.families.common.config_reader import Config, FamilyError
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.families.mamba import LAYER, around
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.block import Block, Sublayer
from regard.parts.norm import RMSNorm
from regard.parts.ssm.mamba2 import Mamba2
from regard.weights.ops import ConvTaps, Split
from regard.weights.table import Link, Table

PACKED = ("gate", "in", "b", "c", "step")
INFINITY = {"__float__": "Infinity"}  # as transformers 5 writes it, for JSON has no word for it


def mixer(theirs: str, ours: str, parts: int = 1) -> tuple[Link, ...]:
    """The weights of one Mamba-2 mixer but its last matrix; its output is normalized in so many parts."""
    return (
        Link(f"{theirs}.in_proj.{{leaf}}", tuple(f"{ours}.{proj}_proj.{{leaf}}" for proj in PACKED), Split()),
        Link(f"{theirs}.conv1d.weight", f"{ours}.conv.weight", ConvTaps()),
        Link(f"{theirs}.conv1d.bias", f"{ours}.conv.bias"),
        Link(f"{theirs}.dt_bias", f"{ours}.step_bias"),
        Link(f"{theirs}.A_log", f"{ours}.A_log"),
        Link(f"{theirs}.D", f"{ours}.D"),
        Link(f"{theirs}.norm.weight", tuple(f"{ours}.norms.{part}.weight" for part in range(parts)), Split()),
    )


TABLE = around(*mixer("backbone.layers.{i}.mixer", f"{LAYER}.body"))


def spec(config: dict[str, Any]) -> Decoder:
    theirs = Config("mamba2", config)
    theirs.only("hidden_act", "silu")
    width, expand = theirs.integer("hidden_size"), theirs.integer("expand", 2)
    head_dim = theirs.integer("head_dim", 64)
    theirs.only("num_heads", expand * width // max(head_dim, 1))
    norm = RMSNorm(theirs.number("layer_norm_epsilon", 1e-5))
    shortest, longest = limits(theirs)
    body = Mamba2(
        state=theirs.integer("state_size", 128),
        head_dim=head_dim,
        expand=expand,
        groups=theirs.integer("n_groups", 8),
        taps=theirs.integer("conv_kernel", 4),
        bias=theirs.flag("use_bias", False),
        conv_bias=theirs.flag("use_conv_bias", True),
        norm=norm,
        shortest=shortest,
        longest=longest,
    )
    return Decoder(
        vocab=theirs.integer("vocab_size"),
        width=width,
        layers=(Repeat((Block((Sublayer(body, norm),)),), theirs.integer("num_hidden_layers")),),
        norm=norm,
        tied=theirs.flag("tie_word_embeddings", False),
    )


def limits(theirs: Config) -> tuple[float | None, float | None]:
    """Of Δ; None: there is none."""
    found = theirs.value("time_step_limit", (list, tuple), (0.0, math.inf))
    numbers = [math.inf if entry == INFINITY else entry for entry in found]
    if len(numbers) != 2 or not all(type(entry) in (int, float) for entry in numbers):
        raise FamilyError(f"{theirs.model_type}: time_step_limit={found!r:.80} should be two numbers")
    return numbers[0] or None, None if numbers[1] == math.inf else numbers[1]


def time_step_limit(body: Mamba2) -> list[Any]:
    return [body.shortest or 0.0, INFINITY if body.longest is None else body.longest]


def config(model: Decoder) -> dict[str, Any]:
    (body,) = bodies(model.blocks[0], Mamba2)
    heads, _ = body.sizes(model.width)
    written = {
        "model_type": "mamba2",
        "architectures": ["Mamba2ForCausalLM"],
        "vocab_size": model.vocab,
        "hidden_size": model.width,
        "num_hidden_layers": len(model.blocks),
        "state_size": body.state,
        "num_heads": heads,
        "head_dim": body.head_dim,
        "expand": body.expand,
        "n_groups": body.groups,
        "conv_kernel": body.taps,
        "use_bias": body.bias,
        "use_conv_bias": body.conv_bias,
        "time_step_limit": time_step_limit(body),
        "hidden_act": "silu",
        "layer_norm_epsilon": getattr(model.norm, "eps", None),
        "tie_word_embeddings": model.tied,
    }
    return check_roundtrip("mamba2", model, written, spec)


def table(model: Decoder) -> Table:
    return TABLE
