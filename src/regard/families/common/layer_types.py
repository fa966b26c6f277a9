"""Layers of several kinds: a list in the config names the kind of each layer, or the family has a rule.

    layer_types = ["sliding_attention", "full_attention", …]        or: every sixth layer attends to all keys

A list is read as its shortest period, which is tiled over the depth, so that the spec is as short as the rule.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from regard.families.common.config_reader import Config, FamilyError
from regard.kernels.attention.patterns.window import Window
from regard.models.decoder import Decoder
from regard.models.stack import Repeat, repeat_blocks
from regard.parts.attention import Attention
from regard.parts.block import Block
from regard.parts.body import Body
from regard.weights.table import Link

FULL, SLIDING = "full_attention", "sliding_attention"
LONGEST_PERIOD = 128  # layers; bounds the work for a config that claims a great depth
BodyType = TypeVar("BodyType", bound=Body)
Kind = TypeVar("Kind", bound=Hashable)


def layer_list(hf_config: Config, key: str, entry: type[Kind], default: tuple[Kind, ...]) -> tuple[Kind, ...]:
    """The list at this key, with one entry per layer; `default` if the config has none."""
    found, depth = hf_config.list_of(entry, key, ()), hf_config.integer("num_hidden_layers")
    if found and len(found) != depth:
        raise FamilyError(f"{hf_config.model_type}: {key} has {len(found)} entries, but num_hidden_layers={depth}")
    return found or default


def layer_interval(hf_config: Config, key: str, default: int) -> int:
    """The n of a rule by which every n-th layer is of another kind."""
    found = hf_config.integer(key, default)
    if not 0 < found <= LONGEST_PERIOD:
        raise hf_config.error(key, found, f"must be from 1 to {LONGEST_PERIOD}")
    return found


def sliding_then_full(hf_config: Config, key: str, default: int) -> tuple[str, ...]:
    """One period of the rule that every n-th layer attends to all keys and the others have a window."""
    return *[SLIDING] * (layer_interval(hf_config, key, default) - 1), FULL


def tile_by_type(hf_config: Config, blocks: Mapping[str, Block], default: tuple[str, ...]) -> tuple[Repeat, ...]:
    """The blocks of the config's `layer_types`, or of the default ones, tiled over the depth of the model."""
    return tile_blocks(hf_config, blocks, layer_list(hf_config, "layer_types", str, default))


def tile_blocks(hf_config: Config, blocks: Mapping[Kind, Block], kinds: tuple[Kind, ...]) -> tuple[Repeat, ...]:
    """The blocks of these kinds, in this order, tiled over the depth of the model."""
    for kind in set(kinds) - set(blocks):
        raise FamilyError(
            f"{hf_config.model_type}: a layer has the type {kind!r}; with these settings it must be one of {[*blocks]}"
        )
    return repeat_blocks(tuple(blocks[kind] for kind in shortest_period(kinds)), hf_config.integer("num_hidden_layers"))


def shortest_period(kinds: tuple[Kind, ...]) -> tuple[Kind, ...]:
    """The shortest sequence that equals `kinds` when it is tiled."""
    return next((kinds[:n] for n in range(1, LONGEST_PERIOD) if kinds[n:] == kinds[:-n]), kinds)


def attention_by_type(hf_config: Config, attention: Attention) -> dict[str, Attention]:
    """The attention of each layer type; without `sliding_window`, that of full layers only."""
    if not hf_config.has("sliding_window"):
        return {FULL: attention}
    return {FULL: attention, SLIDING: replace(attention, mask=Window(hf_config.integer("sliding_window")))}


def window_size(attentions: Sequence[Attention]) -> int | None:
    """The size of the first window."""
    return next((attention.mask.size for attention in attentions if isinstance(attention.mask, Window)), None)


def layer_types(attentions: Sequence[Attention]) -> list[str]:
    return [SLIDING if isinstance(attention.mask, Window) else FULL for attention in attentions]


def window_config(attentions: Sequence[Attention], default: int | None = None) -> dict[str, Any]:
    """The layer types, and the size of the windows; `default` if there are none."""
    return {"sliding_window": window_size(attentions) or default, "layer_types": layer_types(attentions)}


def first_of_type(bodies: Sequence[Body], body_type: type[BodyType], default: BodyType) -> BodyType:
    return next((body for body in bodies if isinstance(body, body_type)), default)


def output_projections(model: Decoder, foreign_names: Mapping[type, str]) -> list[Link]:
    """One link per layer for the output projection of its mixer; `foreign_names` has a name for each type of mixer.

    In our mixers this projection is always o_proj, so the foreign name follows from the type only.
    """
    types = [type(block.sublayers[0].body) for block in model.blocks]
    return [
        Link(f"model.layers.{i}.{foreign_names[mixer]}.{{leaf}}", f"stack.blocks.{i}.sublayers.0.body.o_proj.{{leaf}}")
        for i, mixer in enumerate(types)
    ]
