"""Weights in FP8 with scales: the files of `fp8` (DeepSeek, Qwen), `fbgemm_fp8` and compressed-tensors.

W = s Q        s: one number, one per output, one per group of inputs of an output, or one per block of
               (rows, columns) of the weight, the last blocks cut at the edge: DeepSeek-V3 (arXiv:2412.19437)
"""

import torch
from torch import Tensor

from regard.checkpoint.foreign_quantized.layer import ForeignWeight, LayerFiles, exact_weight, other_weight
from regard.checkpoint.foreign_quantized.scales import SCALES, WHOLE_WEIGHT, BlockSize, ScaleBlocks, read_block_size
from regard.families.common.config_reader import Config
from regard.formats.floats import Float

CODES = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
FIRST_NOT_FINITE = {"float8_e4m3fn": 0x7F, "float8_e5m2": 0x7C}  # the bits without the sign
SCALE_LEAVES = ("weight_scale_inv", "weight_scale")
LEAVES = ("weight", *SCALE_LEAVES, "input_scale", "activation_scale", "input_scale_ub")


def check(config: Config) -> None:
    block_size(config)


def block_size(config: Config) -> BlockSize | None:
    return read_block_size(config, "weight_block_size") if config.has("weight_block_size") else None


def open_layer(layer: LayerFiles, config: Config) -> ForeignWeight:
    leaf = next(leaf for leaf in SCALE_LEAVES if leaf in layer)
    return open_floats(layer, leaf, block_size(config))


def open_floats(layer: LayerFiles, leaf: str, block: BlockSize | None) -> ForeignWeight:
    """leaf: the last name of the scales. block: None for one scale, or one per output."""
    shape = outputs, inputs = layer.matrix("weight", tuple(CODES))
    dtype, blocks = CODES[layer.find("weight").dtype], ScaleBlocks.of(shape, block)
    columns = blocks.size[1]
    layer.expect(leaf, (*SCALES, "F8_E8M0"), blocks.counts, *WHOLE_WEIGHT, *([(outputs,)] if block is None else []))

    def scale() -> Tensor:
        """(outputs, groups)"""
        return blocks.per_output(layer.scales(leaf).float())

    def codes() -> Tensor:
        values = layer.find("weight").read()
        if ((values.view(torch.uint8) & 0x7F) >= FIRST_NOT_FINITE[dtype]).any():
            layer.refuse("weight", "has values that are not finite", found="")
        return values

    def stored() -> dict[str, Tensor]:
        scales = scale()
        return {"codes": codes(), "scale": scales[:, 0].clone() if scales.shape[1] == 1 else scales}

    def dequantize(dtype: torch.dtype) -> Tensor:
        scales = scale().to(dtype).repeat_interleave(columns, 1)[:, :inputs]
        return codes().to(dtype) * scales

    one = blocks.counts[1] == 1 or layer.find(leaf).shape in WHOLE_WEIGHT
    if not one and inputs % columns:
        return other_weight(shape, dequantize, f"blocks of {columns} do not divide its {inputs} inputs")
    return exact_weight(Float(dtype, "channel" if one else columns), shape, stored)  # ty: ignore[invalid-argument-type]
