"""Mamba (Gu & Dao 2023): nothing but selective state spaces, an RMSNorm before each; no attention, no feed-forward.

Their projections are packed: what goes in with its gate, and Δ's low rank with B and C. How Δ is drawn at first is a
choice of training and is not taken over.
"""

from typing import Any

from regard.families.common.config_reader import Config, FamilyError
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.block import Block, Sublayer
from regard.parts.norm import NoNorm, Norm, RMSNorm
from regard.parts.ssm.mamba import Mamba
from regard.weights.ops import ConvTaps, Split
from regard.weights.table import Link, Table

LAYER = "stack.blocks.{i}.sublayers.0"


def mixer(theirs: str, ours: str) -> tuple[Link, ...]:
    """The weights of one Mamba mixer but its last matrix, which every mixer has, so hybrids must say whose it is."""
    return (
        Link(f"{theirs}.in_proj.{{leaf}}", (f"{ours}.in_proj.{{leaf}}", f"{ours}.gate_proj.{{leaf}}"), Split()),
        Link(f"{theirs}.conv1d.weight", f"{ours}.conv.weight", ConvTaps()),
        Link(f"{theirs}.conv1d.bias", f"{ours}.conv.bias"),
        Link(f"{theirs}.x_proj.weight", tuple(f"{ours}.{proj}_proj.weight" for proj in ("rank", "b", "c")), Split()),
        Link(f"{theirs}.dt_proj.weight", f"{ours}.step_proj.weight"),
        Link(f"{theirs}.dt_proj.bias", f"{ours}.step_bias"),
        Link(f"{theirs}.A_log", f"{ours}.A_log"),
        Link(f"{theirs}.D", f"{ours}.D"),
    )


def around(*mixer: Link) -> Table:
    """The table of a model of such mixers and nothing else."""
    return Table(
        Link("backbone.embeddings.weight", "embedding.weight"),
        Link("backbone.layers.{i}.norm.weight", f"{LAYER}.norm.weight"),
        *mixer,
        Link("backbone.layers.{i}.mixer.out_proj.{leaf}", f"{LAYER}.body.o_proj.{{leaf}}"),
        Link("backbone.norm_f.weight", "norm.weight"),
        Link("lm_head.weight", "head.weight"),
        prefix="backbone.",
        ignored=("lm_head.weight",),
        prefix_aliases={"backbone.embedding.": "backbone.embeddings."},  # as its authors name it
    )


TABLE = around(*mixer("backbone.layers.{i}.mixer", f"{LAYER}.body"))


def spec(config: dict[str, Any]) -> Decoder:
    return decoder(Config("mamba", config), NoNorm())


def decoder(theirs: Config, inner: Norm) -> Decoder:
    """`inner` is the norm of Δ's low rank, B and C."""
    theirs.only("hidden_act", "silu")
    width = theirs.integer("hidden_size")
    expand = times(theirs, "intermediate_size", width) or theirs.integer("expand", 2)
    norm = RMSNorm(theirs.number("layer_norm_epsilon", 1e-5))
    body = Mamba(
        state=theirs.integer("state_size", 16),
        expand=expand,
        rank=rank(theirs, "time_step_rank"),
        taps=theirs.integer("conv_kernel", 4),
        bias=theirs.flag("use_bias", False),
        conv_bias=theirs.flag("use_conv_bias", True),
        norm=inner,
    )
    return Decoder(
        vocab=theirs.integer("vocab_size"),
        width=width,
        layers=(Repeat((Block((Sublayer(body, norm),)),), theirs.integer("num_hidden_layers")),),
        norm=norm,
        tied=theirs.flag("tie_word_embeddings", True),
    )


def times(theirs: Config, key: str, width: int) -> int | None:
    """How many times the width this is; None: it is not said. It counts before `expand` (Falcon's says 16, has 2)."""
    if not theirs.has(key):
        return None
    found = theirs.integer(key)
    if width < 1 or found < 1 or found % width:
        raise FamilyError(f"{theirs.model_type}: {key}={found} should be a multiple of hidden_size={width}")
    return found // width


def rank(theirs: Config, key: str) -> int | None:
    """Of Δ's projection; None: a sixteenth of the width."""
    found = theirs.value(key, (int, str), "auto")
    if isinstance(found, str) and found != "auto":
        raise FamilyError(f"{theirs.model_type}: {key}={found!r:.80} should be a number or 'auto'")
    return None if isinstance(found, str) else found


def config(model: Decoder) -> dict[str, Any]:
    return check_roundtrip("mamba", model, written("mamba", "MambaForCausalLM", model), spec)


def written(model_type: str, architecture: str, model: Decoder) -> dict[str, Any]:
    (body,) = bodies(model.blocks[0], Mamba)
    return {
        "model_type": model_type,
        "architectures": [architecture],
        "vocab_size": model.vocab,
        "hidden_size": model.width,
        "num_hidden_layers": len(model.blocks),
        "state_size": body.state,
        "expand": body.expand,
        "time_step_rank": body.rank or "auto",
        "conv_kernel": body.taps,
        "use_bias": body.bias,
        "use_conv_bias": body.conv_bias,
        "hidden_act": "silu",
        "layer_norm_epsilon": getattr(model.norm, "eps", None),
        "tie_word_embeddings": model.tied,
    }


def table(model: Decoder) -> Table:
    return TABLE
