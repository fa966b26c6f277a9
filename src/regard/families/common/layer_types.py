"""Layers of several kinds: a list in the config names the kind of each, or a rule of the family does.

    layer_types = ["sliding_attention", "full_attention", …]        or: every sixth sees all

A list is read as the shortest pattern that gives it when tiled over the depth: then a spec is as short as the rule.
"""

from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import TypeVar

from regard.families.common.config_reader import Config, FamilyError
from regard.kernels.attention.patterns.window import Window
from regard.models.stack import Repeat, tiled
from regard.parts.attention import Attention
from regard.parts.block import Block

FULL, SLIDING = "full_attention", "sliding_attention"
LONGEST = 128  # layers in a pattern; a config may claim any number
HashableType = TypeVar("HashableType", bound=Hashable)


def listed(
    theirs: Config, key: str, kind: type[HashableType], pattern: tuple[HashableType, ...]
) -> tuple[HashableType, ...]:
    """An entry for every layer, or the family's pattern where the config has no list."""
    found, depth = theirs.each(key, kind, ()), theirs.integer("num_hidden_layers")
    if found and len(found) != depth:
        raise FamilyError(f"{theirs.model_type}: {key} has {len(found)} entries, but num_hidden_layers={depth}")
    return found or pattern


def every(theirs: Config, key: str, usual: int) -> int:
    """Of how many layers one, the last, is of another kind."""
    found = theirs.integer(key, usual)
    if not 0 < found <= LONGEST:
        raise FamilyError(f"{theirs.model_type}: {key}={found} should be from 1 to {LONGEST}")
    return found


def arranged(
    theirs: Config, blocks: Mapping[HashableType, Block], kinds: tuple[HashableType, ...]
) -> tuple[Repeat, ...]:
    """The blocks of these kinds in their order, over and over to the depth of the model."""
    for kind in set(kinds) - set(blocks):
        raise FamilyError(f"{theirs.model_type}: a layer is {kind!r}; with these settings there are only {[*blocks]}")
    return tiled(tuple(blocks[kind] for kind in shortest(kinds)), theirs.integer("num_hidden_layers"))


def shortest(kinds: tuple[HashableType, ...]) -> tuple[HashableType, ...]:
    """The shortest pattern that gives them when tiled."""
    return next((kinds[:n] for n in range(1, LONGEST) if kinds[n:] == kinds[:-n]), kinds)


def by_window(theirs: Config, mixer: Attention) -> dict[str, Attention]:
    """The attention of each kind of layer; where the config has no window, there is but one."""
    if not theirs.has("sliding_window"):
        return {FULL: mixer}
    return {FULL: mixer, SLIDING: replace(mixer, mask=Window(theirs.integer("sliding_window")))}


def window(mixers: list[Attention]) -> int | None:
    """The window of those that have one."""
    return next((mixer.mask.size for mixer in mixers if isinstance(mixer.mask, Window)), None)


def layer_types(mixers: list[Attention]) -> list[str]:
    return [SLIDING if isinstance(mixer.mask, Window) else FULL for mixer in mixers]
