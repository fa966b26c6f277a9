"""The files of compressed-tensors (llm-compressor, vLLM): integers of 2 to 8 bits and FP8, by groups of layers.

    pack-quantized      weight_packed (outputs, ⌈inputs · b / 32⌉): codes without gaps, 2^(b-1) larger than the integers
                        weight_zero_point (⌈outputs · b / 32⌉, groups): likewise; weight_shape: (outputs, inputs)
    int-quantized       weight (outputs, inputs) in int8; weight_zero_point (outputs, groups) in int8
    float-quantized     weight in float8_e4m3
    naive-quantized     one of the last two

    W = weight_scale (q - weight_zero_point)        scales of the strategies tensor, channel, group or block

Layers with symmetric int8 weights whose inputs are rounded per token ("dynamic") multiply integers here as well. Other
rounding of inputs and of the cache is left out: products are in full precision.
"""

import math
import re
from typing import Any

import torch
from torch import Tensor

from regard.checkpoint.foreign_quantized.layer import (
    SCALES,
    ForeignWeight,
    LayerFiles,
    as_bytes,
    exact_weight,
    other_weight,
    scale_dtype_name,
)
from regard.checkpoint.foreign_quantized.scaled_floats import open_floats
from regard.families.common.config_reader import Config
from regard.formats.base import pack_bits, unpack_bits
from regard.formats.integers import Group, Integer

LEAVES = (
    "weight", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx", "input_scale",
    "input_zero_point", "input_global_scale", "output_scale", "output_zero_point",
)  # fmt: skip
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
    """The entry for a layer: by its name before a pattern before the class of its module."""
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


def open_layer(layer: LayerFiles, config: Config) -> ForeignWeight:
    entry = group_of(layer.name, config)
    args = Config("quantization_config: weights", entry["weights"])
    strategy, block = args.value("strategy", (str,), "tensor"), None
    if strategy == "group":
        block = (1, args.integer("group_size"))
    elif strategy == "block":
        block = read_block(args)
    elif strategy not in ("tensor", "channel"):
        raise args.error("strategy", strategy, "is not read, only 'tensor', 'channel', 'group' and 'block' are")
    if block is not None and min(block) < 1:
        raise args.error("group_size", block[1], "must be positive")
    bits, kind = args.integer("num_bits", 8), args.value("type", (str,), "int")
    if kind == "float":
        if bits != 8:
            raise args.error("num_bits", bits, "is not read for type='float', only 8 is")
        return open_floats(layer, "weight_scale", block)
    if kind != "int" or not 2 <= bits <= 8:
        raise args.error("num_bits", bits, f"of type {kind!r:.20} is not read, only int of 2 to 8 bits and float of 8")
    return open_integers(layer, bits, args.flag("symmetric", True), block, entry.get("input_activations"))


def read_block(args: Config) -> tuple[int, int]:
    block = args.values.get("block_structure")
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise args.error("block_structure", block, "must be two positive integers")
    return block[0], block[1]


def open_integers(
    layer: LayerFiles, bits: int, symmetric: bool, block: tuple[int, int] | None, activations: Any
) -> ForeignWeight:
    packed, middle = "weight_packed" in layer, 1 << bits - 1
    if packed:
        outputs, inputs = shape = read_shape(layer)
        layer.expect("weight_packed", ("I32",), (outputs, words(inputs, bits)))
    else:
        outputs, inputs = shape = layer.matrix("weight", ("I8",))
    rows, size = (1, inputs) if block is None else (min(block[0], outputs), min(block[1], inputs))
    grid = (-(-outputs // rows), -(-inputs // size))
    shapes = [grid, *([(), (1,), (1, 1), (outputs,)] if block is None else [])]
    scales = layer.expect("weight_scale", SCALES, *shapes)
    zero_packed = packed and not symmetric
    if zero_packed:
        layer.expect("weight_zero_point", ("I32",), (words(grid[0], bits), grid[1]))
    elif "weight_zero_point" in layer:
        layer.expect("weight_zero_point", ("I8",), *shapes)
    elif not symmetric:
        layer.find("weight_zero_point")
    natural = torch.arange(inputs, dtype=torch.int32) // size
    index = layer.small("weight_g_idx", ("I32",), (inputs,)) if "weight_g_idx" in layer else natural
    if (index == -1).all():  # not used
        index = natural
    if index.min() < 0 or index.max() >= grid[1]:
        layer.refuse("weight_g_idx", f"should have groups from 0 to {grid[1] - 1}", found="")

    def per_output(values: Tensor) -> Tensor:
        """(outputs, groups)"""
        whole = values.reshape(1, 1).expand(grid) if values.numel() == 1 else values.view(grid)
        return whole.repeat_interleave(rows, 0)[:outputs].contiguous()

    def zeros() -> Tensor:
        """(outputs, groups) of uint8, shifted as the codes"""
        if zero_packed:
            columns = as_bytes(layer.find("weight_zero_point").read().t())
            return per_output(unpack_any(columns, bits, grid[0]).t())
        values = layer.find("weight_zero_point").read().to(torch.int16) + middle
        if values.min() < 0 or values.max() >= 2 * middle:
            layer.refuse("weight_zero_point", f"has values that are no integers of {bits} bits", found="")
        return per_output(values.to(torch.uint8))

    def codes() -> Tensor:
        """(outputs, inputs)"""
        if packed:
            return unpack_any(as_bytes(layer.find("weight_packed").read()), bits, inputs)
        values = layer.find("weight").read().to(torch.int16) + middle
        if values.min() < 0 or values.max() >= 2 * middle:
            layer.refuse("weight", f"has values that are no integers of {bits} bits", found="")
        return values.to(torch.uint8)

    def check_symmetric() -> None:
        if symmetric and "weight_zero_point" in layer and (zeros() != middle).any():
            layer.refuse("weight_zero_point", "should be 0, because the config says symmetric", found="")

    def stored() -> dict[str, Tensor]:
        check_symmetric()
        result = {"codes": pack_bits(codes(), bits), "scale": per_output(layer.scales("weight_scale"))}
        return result if symmetric else result | {"zero": zeros()}

    def dequantize(dtype: torch.dtype) -> Tensor:
        check_symmetric()
        zero = zeros().to(dtype)[:, index.long()] if not symmetric else middle
        return (codes().to(dtype) - zero) * per_output(layer.scales("weight_scale")).to(dtype)[:, index.long()]

    if not torch.equal(index, natural):
        return other_weight(shape, dequantize, "it was quantized with act-order (actorder: group)")
    if inputs % size or inputs * bits % 8:
        return other_weight(shape, dequantize, f"groups of {size} or whole bytes do not divide its {inputs} inputs")
    group: Group = "channel" if grid[1] == 1 else size
    int8_inputs = bits == 8 and symmetric and group == "channel" and per_token(activations)
    format = Integer(bits, symmetric, group, scale_dtype_name(scales))  # ty: ignore[invalid-argument-type]
    return exact_weight(format, shape, stored, int8_inputs)


def per_token(activations: Any) -> bool:
    return isinstance(activations, dict) and PER_TOKEN.items() <= ({"symmetric": True} | activations).items()


def words(count: int, bits: int) -> int:
    """The words of 32 bits that this number of codes fills."""
    return -(-count * bits // 32)


def unpack_any(packed: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` codes of rows of bytes, whose last codes may be cut."""
    extra = -packed.shape[-1] % bits  # eight codes fill `bits` bytes
    return unpack_bits(torch.nn.functional.pad(packed, (0, extra)), bits)[..., :count].contiguous()


def read_shape(layer: LayerFiles) -> tuple[int, int]:
    outputs, inputs = layer.small("weight_shape", ("I64", "I32"), (2,)).tolist()
    if not (0 < outputs < 1 << 31 and 0 < inputs < 1 << 31):
        layer.refuse("weight_shape", f"should be two sizes, found {[outputs, inputs]}", found="")
    return outputs, inputs
