"""Mamba (Gu & Dao 2023): layers of selective state spaces after an RMSNorm; no attention, no feed-forward.

In `transformers` the input and the gate are fused, and so are the low-rank Δ, B and C. The initialization of Δ is an
option of training and is not converted.
"""

from typing import Any

from regard.families.common.config_reader import Config
from regard.families.common.decoder import decoder_config, read_decoder
from regard.families.common.names import ATTENTION
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.models.decoder import Decoder
from regard.parts.block import Block, Sublayer
from regard.parts.norm import NoNorm, Norm, RMSNorm
from regard.parts.ssm.mamba import Mamba
from regard.weights.ops import ConvTaps, Split
from regard.weights.table import Link, Table


def state_space_links(foreign: str, ours: str) -> tuple[Link, ...]:
    """The weights that Mamba and Mamba-2 have in common."""
    return (
        Link(f"{foreign}.conv1d.weight", f"{ours}.conv.weight", ConvTaps()),
        Link(f"{foreign}.conv1d.bias", f"{ours}.conv.bias"),
        Link(f"{foreign}.A_log", f"{ours}.A_log"),
        Link(f"{foreign}.D", f"{ours}.D"),
    )


def mixer_links(foreign: str, ours: str) -> tuple[Link, ...]:
    """A mixer without its output projection, whose name in hybrids depends on the layer."""
    return (
        *state_space_links(foreign, ours),
        Link(f"{foreign}.in_proj.{{leaf}}", (f"{ours}.in_proj.{{leaf}}", f"{ours}.gate_proj.{{leaf}}"), Split()),
        Link(f"{foreign}.x_proj.weight", tuple(f"{ours}.{proj}_proj.weight" for proj in ("rank", "b", "c")), Split()),
        Link(f"{foreign}.dt_proj.weight", f"{ours}.step_proj.weight"),
        Link(f"{foreign}.dt_proj.bias", f"{ours}.step_bias"),
    )


def common_table(*mixer: Link) -> Table:
    """The table of a model of state spaces only; `mixer` has the links of a mixer."""
    return Table(
        Link("backbone.embeddings.weight", "embedding.weight"),
        Link("backbone.layers.{i}.norm.weight", f"{ATTENTION}.norm.weight"),
        *mixer,
        Link("backbone.layers.{i}.mixer.out_proj.{leaf}", f"{ATTENTION}.body.o_proj.{{leaf}}"),
        Link("backbone.norm_f.weight", "norm.weight"),
        Link("lm_head.weight", "head.weight"),
        prefix="backbone.",
        ignored=("lm_head.weight",),
        prefix_aliases={"backbone.embedding.": "backbone.embeddings."},  # the name in the authors' files
    )


TABLE = common_table(*mixer_links("backbone.layers.{i}.mixer", f"{ATTENTION}.body"))


def spec(config: dict[str, Any]) -> Decoder:
    return read_mamba_decoder(Config("mamba", config), NoNorm())


def read_mamba_decoder(hf_config: Config, inner_norm: Norm) -> Decoder:
    """`inner_norm` is applied to the low-rank Δ, to B and to C."""
    hf_config.accept_only("hidden_act", "silu")
    norm = RMSNorm(hf_config.number("layer_norm_epsilon", 1e-5))
    mixer = Mamba(
        state=hf_config.integer("state_size", 16),
        expand=read_expand(hf_config),
        rank=read_rank(hf_config, "time_step_rank"),
        taps=hf_config.integer("conv_kernel", 4),
        bias=hf_config.flag("use_bias", False),
        conv_bias=hf_config.flag("use_conv_bias", True),
        norm=inner_norm,
    )
    return read_decoder(hf_config, Block((Sublayer(mixer, norm),)), norm, tied=True, context=None)


def read_expand(hf_config: Config) -> int:
    """The inner width in multiples of the width; `intermediate_size` has priority over `expand`.

    The published configs of FalconMamba have both, with different values.
    """
    if not hf_config.has("intermediate_size"):
        return hf_config.integer("expand", 2)
    width, found = hf_config.integer("hidden_size"), hf_config.integer("intermediate_size")
    if width < 1 or found < 1 or found % width:
        raise hf_config.error("intermediate_size", found, f"must be a multiple of hidden_size={width}")
    return found // width


def read_rank(hf_config: Config, key: str) -> int | None:
    """The rank of the projection of Δ; None, the default: width / 16."""
    found = hf_config.value(key, (int, str), "auto")
    if isinstance(found, str) and found != "auto":
        raise hf_config.error(key, found, "must be a number or 'auto'")
    return None if isinstance(found, str) else found


def config(model: Decoder) -> dict[str, Any]:
    return check_roundtrip("mamba", model, common_config("mamba", "MambaForCausalLM", model), spec)


def common_config(model_type: str, architecture: str, model: Decoder) -> dict[str, Any]:
    (mixer,) = bodies(model.blocks[0], Mamba)
    return decoder_config(model_type, architecture, model) | {
        "state_size": mixer.state,
        "expand": mixer.expand,
        "time_step_rank": mixer.rank or "auto",
        "conv_kernel": mixer.taps,
        "use_bias": mixer.bias,
        "use_conv_bias": mixer.conv_bias,
        "hidden_act": "silu",
        "layer_norm_epsilon": getattr(model.norm, "eps", None),
    }


def table(model: Decoder) -> Table:
    return TABLE
