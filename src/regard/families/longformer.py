"""Longformer (Beltagy et al. 2020): RoBERTa in windows, whose global tokens have projections of their own.

A config does not say which tokens are global. Every call of theirs may; where none does, the first token is for the
class that labels texts, and none for the others. So it is here; a spec with another `Longformer(window, globals)` has
the same weights. `attention_window` counts both sides.
"""

from itertools import groupby
from typing import Any

from regard.families import bert, roberta
from regard.families.common.config_reader import Config, FamilyError
from regard.families.common.encoder_heads import architecture, copies
from regard.families.common.roundtrip import bodies, check_roundtrip
from regard.kernels.attention.patterns.longformer import Longformer
from regard.kernels.attention.patterns.window import Window
from regard.models.encoder import Encoder
from regard.models.stack import Repeat
from regard.parts.block import Block
from regard.parts.feedforward import FeedForward
from regard.parts.global_attention import GlobalAttention
from regard.weights.table import Link, Table

PROJECTIONS = {"query_global": "q_proj", "key_global": "k_proj", "value_global": "v_proj"}


def spec(config: dict[str, Any]) -> Encoder:
    theirs = Config("longformer", config)
    heads = roberta.heads(theirs, "Longformer")
    first = theirs.architecture(heads) == "LongformerForSequenceClassification"
    return bert.encoder(theirs, layers(theirs, first), roberta.position(theirs), heads)


def layers(theirs: Config, first: bool) -> tuple[Repeat, ...]:
    """`first`: is the first token global?"""
    runs = sides(theirs, theirs.integer("num_hidden_layers"))
    return tuple(Repeat((block(theirs, side, first),), times) for side, times in runs)


def sides(theirs: Config, depth: int) -> list[tuple[int, int]]:
    """How far runs of layers see to each side, and how long they are: one window for all, or one for each layer."""
    found = theirs.value("attention_window", (int, list), 512)
    windows = None if isinstance(found, int) else theirs.each("attention_window", int)
    runs = [(found, depth)] if windows is None else [(window, len(list(run))) for window, run in groupby(windows)]
    if windows is not None and len(windows) != depth:
        raise FamilyError(
            f"{theirs.model_type}: attention_window={found!r:.80} should have one for each of {depth} layers"
        )
    for window, _ in runs:
        if window < 2 or window % 2:
            raise FamilyError(f"{theirs.model_type}: attention_window={window} counts both sides, so it should be even")
    return [(window // 2, times) for window, times in runs]


def block(theirs: Config, side: int, first: bool) -> Block:
    mask = Longformer(side) if first else Window(side, causal=False)
    return bert.block(theirs, GlobalAttention(theirs.integer("num_attention_heads"), mask=mask, bias=True))


def config(model: Encoder) -> dict[str, Any]:
    mixers = [bodies(block, GlobalAttention, FeedForward)[0] for block in model.blocks]
    sides = [getattr(mixer.mask, "window", getattr(mixer.mask, "size", 0)) for mixer in mixers]
    windows = {"attention_window": [2 * side for side in sides]}
    written = {"model_type": "longformer", **roberta.settings(model), **windows}
    theirs = Config("longformer", written)
    written["architectures"] = [architecture(model.head, theirs, roberta.heads(theirs, "Longformer"))]
    return check_roundtrip("longformer", model, written, spec)


def table(model: Encoder) -> Table:
    base = bert.base_of(model, "longformer.")
    theirs, ours = f"{base}encoder.layer.{{i}}.attention.self", f"{bert.ATTENTION}.body.of_globals"
    return Table(
        *bert.links(base),
        *(Link(f"{theirs}.{name}.{{leaf}}", f"{ours}.{proj}.{{leaf}}") for name, proj in PROJECTIONS.items()),
        *roberta.head_links(model.head),
        ignored=roberta.ignored(base),
        derived=copies(base, "lm_head"),
    )
