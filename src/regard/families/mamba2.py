"""Mamba-2 (Dao & Gu 2024): layers of state spaces with one decay rate per head, after an RMSNorm; no attention.

In `transformers` the projections of the gate, the input, B, C and Δ are fused. The initialization of Δ is an option of
training and is not converted.
"""

import math
from typing import Any

from regard.families.common.config_reader import Config
from regard.families.common.decoder import decoder_config, read_decoder
from regard.families.common.names import ATTENTION
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.families.mamba import common_table, state_space_links
from regard.models.decoder import Decoder
from regard.parts.block import Block, Sublayer
from regard.parts.norm import RMSNorm
from regard.parts.ssm.mamba2 import Mamba2
from regard.weights.ops import Split
from regard.weights.table import Link, Table

FUSED = ("gate", "in", "b", "c", "step")
INFINITY = {"__float__": "Infinity"}  # as transformers 5 writes it: JSON has no infinity


def mixer_links(foreign: str, ours: str, norm_groups: int = 1) -> tuple[Link, ...]:
    """A mixer without its output projection; its output is normalized in `norm_groups` groups."""
    norms = tuple(f"{ours}.norms.{group}.weight" for group in range(norm_groups))
    return (
        *state_space_links(foreign, ours),
        Link(f"{foreign}.in_proj.{{leaf}}", tuple(f"{ours}.{proj}_proj.{{leaf}}" for proj in FUSED), Split()),
        Link(f"{foreign}.dt_bias", f"{ours}.step_bias"),
        Link(f"{foreign}.norm.weight", norms, Split()),
    )


TABLE = common_table(*mixer_links("backbone.layers.{i}.mixer", f"{ATTENTION}.body"))


def spec(config: dict[str, Any]) -> Decoder:
    hf_config = Config("mamba2", config)
    hf_config.accept_only("hidden_act", "silu")
    width, expand = hf_config.integer("hidden_size"), hf_config.integer("expand", 2)
    head_dim = hf_config.integer("head_dim", 64)
    hf_config.accept_only("num_heads", expand * width // max(head_dim, 1))
    norm = RMSNorm(hf_config.number("layer_norm_epsilon", 1e-5))
    shortest, longest = read_step_limits(hf_config)
    mixer = Mamba2(
        state=hf_config.integer("state_size", 128),
        head_dim=head_dim,
        expand=expand,
        groups=hf_config.integer("n_groups", 8),
        taps=hf_config.integer("conv_kernel", 4),
        bias=hf_config.flag("use_bias", False),
        conv_bias=hf_config.flag("use_conv_bias", True),
        norm=norm,
        shortest=shortest,
        longest=longest,
    )
    return read_decoder(hf_config, Block((Sublayer(mixer, norm),)), norm, context=None)


def read_step_limits(hf_config: Config) -> tuple[float | None, float | None]:
    """The lower and upper limit of Δ; None: no limit."""
    found = hf_config.value("time_step_limit", (list, tuple), (0.0, math.inf))
    limits = [math.inf if entry == INFINITY else entry for entry in found]
    if len(limits) != 2 or not all(type(entry) in (int, float) for entry in limits):
        raise hf_config.error("time_step_limit", found, "must be two numbers")
    return limits[0] or None, None if limits[1] == math.inf else limits[1]


def time_step_limit(mixer: Mamba2) -> list[Any]:
    return [mixer.shortest or 0.0, INFINITY if mixer.longest is None else mixer.longest]


def config(model: Decoder) -> dict[str, Any]:
    (mixer,) = bodies(model.blocks[0], Mamba2)
    settings = decoder_config("mamba2", "Mamba2ForCausalLM", model) | {
        "state_size": mixer.state,
        "num_heads": mixer.sizes(model.width)[0],
        "head_dim": mixer.head_dim,
        "expand": mixer.expand,
        "n_groups": mixer.groups,
        "conv_kernel": mixer.taps,
        "use_bias": mixer.bias,
        "use_conv_bias": mixer.conv_bias,
        "time_step_limit": time_step_limit(mixer),
        "hidden_act": "silu",
        "layer_norm_epsilon": getattr(model.norm, "eps", None),
    }
    return check_roundtrip("mamba2", model, settings, spec)


def table(model: Decoder) -> Table:
    return TABLE
