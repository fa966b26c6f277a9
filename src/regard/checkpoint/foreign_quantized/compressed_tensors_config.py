"""The settings of compressed-tensors: groups of layers, each with its number format.

A group lists its layers in `targets`, by name, by a pattern ("re:…") or by the class of the module.
"""

import math
import re
from typing import Any

from regard.checkpoint.foreign_quantized.scales import BlockSize, read_block_size
from regard.families.common.config_reader import Config

READ = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
PER_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
MAX_PATTERN = 200  # characters
MAX_TRIALS = 1_000_000  # ways in which a pattern may match, all of which `re` tries if none does


def check(config: Config) -> None:
    for key in ("transform_config", "sparsity_config"):
        value = config.values.get(key)
        if value and not (isinstance(value, dict) and value.get("format") == "dense"):
            raise config.error(key, value, "is not read; use the model without it")
    layouts = {config.values.get("format") or "dense", *(group.get("format") for group in groups(config))} - {None}
    for layout in layouts:
        if layout not in (*READ, "mixed-precision", "dense"):
            raise config.error("format", layout, f"is not read, only {', '.join(READ)} are")


def groups(config: Config) -> list[dict[str, Any]]:
    """The entries of config_groups that quantize weights."""
    found = config.values.get("config_groups")
    entries = list(found.values()) if isinstance(found, dict) else [found]
    for entry in entries:
        targets = entry.get("targets") if isinstance(entry, dict) else None
        if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
            raise config.error("config_groups", found, "must be objects with a list of targets")
        weights = entry.get("weights")
        if weights is not None and not isinstance(weights, dict):
            raise config.error("weights", weights, "must be an object")
    return [entry for entry in entries if entry.get("weights") is not None]


def group_of(name: str, config: Config) -> dict[str, Any]:
    """The entry for a layer. Its name has precedence over patterns, and these over the class of its module."""
    candidates = groups(config)
    for entry in candidates:
        if name in entry["targets"]:
            return entry
    for entry in candidates:
        if any(target.startswith("re:") and matches(config, target[3:], name) for target in entry["targets"]):
            return entry
    for entry in candidates:
        if any(target.endswith("Linear") for target in entry["targets"]):
            return entry
    raise config.error("config_groups", [entry["targets"] for entry in candidates], f"has no targets with {name}")


def matches(config: Config, pattern: str, name: str) -> bool:
    if len(pattern) > MAX_PATTERN or trials(pattern, len(name)) > MAX_TRIALS:
        raise config.error("targets", pattern, "is too complex a pattern; list names of layers instead")
    try:
        return re.match(pattern, name) is not None
    except (re.error, RecursionError, OverflowError) as error:
        raise config.error("targets", pattern, f"is not a valid pattern ({error})") from error


def trials(pattern: str, length: int) -> float:
    """A bound for the ways in which a pattern can match a string: (.|a)(.|a)… and (a+)+ have exponentially many.

    k repetitions of single characters end at C(length + k, k) places. Groups multiply their numbers of alternatives.
    """
    skeleton = re.sub(r"\\.", "x", pattern, flags=re.DOTALL)
    skeleton = re.sub(r"\[\^?\]?[^\]]*\]", "x", skeleton)
    skeleton = re.sub(r"\(\?[:=!]", "(", skeleton)
    if "(?" in skeleton or re.search(r"\)[*+{]", skeleton):  # other syntax, repeated groups
        return math.inf
    result = 1
    while innermost := re.findall(r"\(([^()]*)\)(\??)", skeleton):
        result *= math.prod(group.count("|") + 1 + len(optional) for group, optional in innermost)
        skeleton = re.sub(r"\(([^()]*)\)\??", lambda group: group[1].replace("|", ""), skeleton)
    repetitions = sum(map(skeleton.count, "*+?{"))
    return result * (skeleton.count("|") + 1) * math.comb(length + repetitions, repetitions)


def weight_block(weights: Config) -> BlockSize | None:
    """The block of weights that share a scale; None: they share it per output, or in the whole weight."""
    strategy = weights.value("strategy", (str,), "tensor")
    if strategy == "block":
        return read_block_size(weights, "block_structure")
    if strategy == "group":
        size = weights.integer("group_size")
        if size < 1:
            raise weights.error("group_size", size, "must be positive")
        return 1, size
    if strategy not in ("tensor", "channel"):
        raise weights.error("strategy", strategy, "is not read, only 'tensor', 'channel', 'group' and 'block' are")
    return None


def rounds_per_token(activations: Any) -> bool:
    """Whether inputs are rounded to int8 with a scale per token."""
    return isinstance(activations, dict) and PER_TOKEN.items() <= ({"symmetric": True} | activations).items()
