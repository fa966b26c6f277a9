"""Longformer (Beltagy et al. 2020): RoBERTa with windows; global tokens have separate projections.

A config does not define which tokens are global. In transformers they are an argument of the forward: by default the
first token in the class for sequence classification, and none in the other classes, as here. A spec with another
`Longformer(window, globals)` has the same weights. `attention_window` counts both sides.
"""

from functools import partial
from itertools import groupby
from typing import Any

from regard.families import bert, roberta
from regard.families.common.config_reader import Config
from regard.families.common.encoder_heads import check_encoder_roundtrip, tied_copies
from regard.families.common.names import ATTENTION, module_links
from regard.families.common.roundtrip import bodies
from regard.kernels.attention.patterns.longformer import Longformer
from regard.kernels.attention.patterns.window import Window
from regard.models.encoder import Encoder
from regard.models.stack import Repeat
from regard.parts.block import Block
from regard.parts.feedforward import FeedForward
from regard.parts.global_attention import GlobalAttention
from regard.weights.table import Table

GLOBAL_PROJECTIONS = {"query_global": "q_proj", "key_global": "k_proj", "value_global": "v_proj"}
heads = partial(roberta.heads, name="Longformer")


def spec(config: dict[str, Any]) -> Encoder:
    hf_config = Config("longformer", config)
    classes = heads(hf_config)
    first_is_global = hf_config.architecture(classes) == "LongformerForSequenceClassification"
    runs = window_runs(hf_config, hf_config.integer("num_hidden_layers"))
    layers = tuple(Repeat((read_block(hf_config, side, first_is_global),), times) for side, times in runs)
    return bert.read_encoder(hf_config, layers, roberta.read_positions(hf_config), classes)


def window_runs(hf_config: Config, depth: int) -> list[tuple[int, int]]:
    """(window on each side, number of layers) of successive layers; the config has one window, or one per layer."""
    found = hf_config.value("attention_window", (int, list), 512)
    windows = None if isinstance(found, int) else hf_config.list_of(int, "attention_window")
    runs = [(found, depth)] if windows is None else [(window, len(list(run))) for window, run in groupby(windows)]
    if windows is not None and len(windows) != depth:
        raise hf_config.error("attention_window", found, f"must have one entry for each of {depth} layers")
    for window, _ in runs:
        if window < 2 or window % 2:
            raise hf_config.error("attention_window", window, "must be even and positive, because it counts both sides")
    return [(window // 2, times) for window, times in runs]


def read_block(hf_config: Config, side: int, first_is_global: bool) -> Block:
    mask = Longformer(side) if first_is_global else Window(side, causal=False)
    return bert.read_block(hf_config, GlobalAttention(hf_config.integer("num_attention_heads"), mask=mask, bias=True))


def config(model: Encoder) -> dict[str, Any]:
    masks = [bodies(block, GlobalAttention, FeedForward)[0].mask for block in model.blocks]
    sides = [getattr(mask, "window", getattr(mask, "size", 0)) for mask in masks]
    settings = roberta.common_config("longformer", model) | {"attention_window": [2 * side for side in sides]}
    return check_encoder_roundtrip(model, settings, spec, heads)


def table(model: Encoder) -> Table:
    base = bert.base_prefix(model, "longformer.")
    names = {name: f"{ATTENTION}.body.of_globals.{proj}" for name, proj in GLOBAL_PROJECTIONS.items()}
    return Table(
        *bert.encoder_links(base),
        *module_links(f"{base}encoder.layer.{{i}}.attention.self", names),
        *roberta.head_links(model.head, base),
        ignored=roberta.ignored(base),
        derived=tied_copies(base, "lm_head"),
    )
