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

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.checkpoint.foreign_quantized.compressed_tensors_config import group_of, rounds_per_token, weight_block
from regard.checkpoint.foreign_quantized.layer import (
    ForeignWeight,
    LayerFiles,
    as_bytes,
    exact_weight,
    other_weight,
)
from regard.checkpoint.foreign_quantized.scaled_floats import open_floats
from regard.checkpoint.foreign_quantized.scales import (
    SCALES,
    WHOLE_WEIGHT,
    BlockSize,
    ScaleBlocks,
    scale_dtype_name,
)
from regard.families.common.config_reader import Config
from regard.formats.base import pack_bits, unpack_bits
from regard.formats.integers import Group, Integer
from regard.weights.table import StoredTensor

LEAVES = (
    "weight", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx", "input_scale",
    "input_zero_point", "input_global_scale", "output_scale", "output_zero_point",
)  # fmt: skip


def open_layer(layer: LayerFiles, config: Config) -> ForeignWeight:
    group = group_of(layer.name, config)
    weights = Config("quantization_config: weights", group["weights"])
    block = weight_block(weights)
    bits, kind = weights.integer("num_bits", 8), weights.value("type", (str,), "int")
    if kind == "float":
        if bits != 8:
            raise weights.error("num_bits", bits, "is not read for type='float', only 8 is")
        return open_floats(layer, "weight_scale", block)
    if kind != "int" or not 2 <= bits <= 8:
        rule = f"of type {kind!r:.20} is not read, only int of 2 to 8 bits and float of 8"
        raise weights.error("num_bits", bits, rule)
    return open_integers(layer, bits, weights.flag("symmetric", True), block, group.get("input_activations"))


def open_integers(
    layer: LayerFiles, bits: int, symmetric: bool, block: BlockSize | None, activations: Any
) -> ForeignWeight:
    shape = check_codes(layer, bits)
    blocks = ScaleBlocks.of(shape, block)
    scales = check_scales(layer, bits, symmetric, blocks, block is None)
    (_, inputs), (_, size), (_, groups) = shape, blocks.size, blocks.counts
    consecutive = torch.arange(inputs, dtype=torch.int32) // size
    input_groups = read_input_groups(layer, inputs, groups)
    if input_groups is None:
        input_groups = consecutive
    integers = StoredIntegers(layer, bits, symmetric, blocks, input_groups)
    if not torch.equal(input_groups, consecutive):
        return other_weight(shape, integers.dequantize, "it was quantized with act-order (actorder: group)")
    if inputs % size or inputs * bits % 8:
        reason = f"groups of {size} or whole bytes do not divide its {inputs} inputs"
        return other_weight(shape, integers.dequantize, reason)
    group: Group = "channel" if groups == 1 else size
    int8_inputs = bits == 8 and symmetric and group == "channel" and rounds_per_token(activations)
    format = Integer(bits, symmetric, group, scale_dtype_name(scales))  # ty: ignore[invalid-argument-type]
    return exact_weight(format, shape, integers.stored, int8_inputs)


def check_codes(layer: LayerFiles, bits: int) -> tuple[int, int]:
    """Check the header of the codes; returns the shape of the weight, (outputs, inputs)."""
    if "weight_packed" not in layer:
        return layer.matrix("weight", ("I8",))
    outputs, inputs = layer.small("weight_shape", ("I64", "I32"), (2,)).tolist()
    if not (0 < outputs < 1 << 31 and 0 < inputs < 1 << 31):
        layer.refuse("weight_shape", f"should be two sizes, found {[outputs, inputs]}", found="")
    layer.expect("weight_packed", ("I32",), (outputs, words(inputs, bits)))
    return outputs, inputs


def check_scales(layer: LayerFiles, bits: int, symmetric: bool, blocks: ScaleBlocks, per_output: bool) -> StoredTensor:
    """Check the headers of the scales, which are returned, and of the zero points.

    per_output: there may be one number per output, or one for the whole weight.
    """
    rows, columns = blocks.counts
    shapes = [(rows, columns), *([*WHOLE_WEIGHT, (rows,)] if per_output else [])]
    scales = layer.expect("weight_scale", SCALES, *shapes)
    if "weight_packed" in layer and not symmetric:
        layer.expect("weight_zero_point", ("I32",), (words(rows, bits), columns))
    elif not symmetric or "weight_zero_point" in layer:
        layer.expect("weight_zero_point", ("I8",), *shapes)
    return scales


def read_input_groups(layer: LayerFiles, inputs: int, groups: int) -> Tensor | None:
    """The group of every input (inputs,); None: groups are consecutive inputs."""
    if "weight_g_idx" not in layer:
        return None
    found = layer.small("weight_g_idx", ("I32",), (inputs,))
    if (found == -1).all():
        return None
    if found.min() < 0 or found.max() >= groups:
        layer.refuse("weight_g_idx", f"should have groups from 0 to {groups - 1}", found="")
    return found


@dataclass(frozen=True, eq=False)
class StoredIntegers:
    """Reads the numbers of a layer. Codes and zero points are shifted by 2^(b-1), so that they are not negative."""

    layer: LayerFiles
    bits: int
    symmetric: bool
    blocks: ScaleBlocks
    input_groups: Tensor  # (inputs,)

    @property
    def middle(self) -> int:
        return 1 << self.bits - 1

    def codes(self) -> Tensor:
        """(outputs, inputs)"""
        if "weight_packed" in self.layer:
            return unpack_any(as_bytes(self.layer.find("weight_packed").read()), self.bits, self.blocks.shape[1])
        return self.shifted("weight")

    def zeros(self) -> Tensor:
        """(outputs, groups)"""
        if "weight_packed" not in self.layer or self.symmetric:
            return self.blocks.per_output(self.shifted("weight_zero_point"))
        columns = as_bytes(self.layer.find("weight_zero_point").read().t())
        return self.blocks.per_output(unpack_any(columns, self.bits, self.blocks.counts[0]).t())

    def shifted(self, leaf: str) -> Tensor:
        values = self.layer.find(leaf).read().to(torch.int16) + self.middle
        if values.min() < 0 or values.max() >= 2 * self.middle:
            self.layer.refuse(leaf, f"has values that are no integers of {self.bits} bits", found="")
        return values.to(torch.uint8)

    def scales(self) -> Tensor:
        """(outputs, groups)"""
        return self.blocks.per_output(self.layer.scales("weight_scale"))

    def check_symmetric(self) -> None:
        if self.symmetric and "weight_zero_point" in self.layer and (self.zeros() != self.middle).any():
            self.layer.refuse("weight_zero_point", "should be 0, because the config says symmetric", found="")

    def stored(self) -> dict[str, Tensor]:
        self.check_symmetric()
        result = {"codes": pack_bits(self.codes(), self.bits), "scale": self.scales()}
        return result if self.symmetric else result | {"zero": self.zeros()}

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        self.check_symmetric()
        index = self.input_groups.long()
        zero = self.middle if self.symmetric else self.zeros().to(dtype)[:, index]
        return (self.codes().to(dtype) - zero) * self.scales().to(dtype)[:, index]


def words(count: int, bits: int) -> int:
    """The words of 32 bits that this number of codes fills."""
    return -(-count * bits // 32)


def unpack_any(packed: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` codes of rows of bytes, whose last codes may be cut."""
    extra = -packed.shape[-1] % bits  # eight codes fill `bits` bytes
    return unpack_bits(torch.nn.functional.pad(packed, (0, extra)), bits)[..., :count].contiguous()
