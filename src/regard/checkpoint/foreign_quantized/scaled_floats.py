"""Weights in FP8 with scales: the files of `fp8` (DeepSeek, Qwen), `fbgemm_fp8` and compressed-tensors.

    W = s Q        s: one number, one per output, one per group of inputs of an output, or one per block of
                   (rows, columns) of the weight, the last blocks cut at the edge: DeepSeek-V3 (arXiv:2412.19437)

The scales of blocks are repeated for every output of the block: our format has a scale per output and group of inputs.
"""

import torch
from torch import Tensor

from regard.checkpoint.foreign_quantized.layer import SCALES, ForeignWeight, LayerFiles, exact_weight, other_weight
from regard.families.common.config_reader import Config
from regard.formats.floats import Float

CODES = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
FIRST_NOT_FINITE = {"float8_e4m3fn": 0x7F, "float8_e5m2": 0x7C}  # the bits without the sign
SCALE_LEAVES = ("weight_scale_inv", "weight_scale")
LEAVES = ("weight", *SCALE_LEAVES, "input_scale", "activation_scale", "input_scale_ub")
BlockSize = tuple[int, int]  # (rows, columns)


def check(config: Config) -> None:
    block_size(config)


def block_size(config: Config) -> BlockSize | None:
    block = config.values.get("weight_block_size")
    if block is None:
        return None
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise config.error("weight_block_size", block, "must be two positive integers")
    return block[0], block[1]


def open_layer(layer: LayerFiles, config: Config) -> ForeignWeight:
    leaf = next(leaf for leaf in SCALE_LEAVES if leaf in layer)
    return open_floats(layer, leaf, block_size(config))


def open_floats(layer: LayerFiles, leaf: str, block: BlockSize | None) -> ForeignWeight:
    """leaf: the last name of the scales. block: None for one scale, or one per output."""
    outputs, inputs = shape = layer.matrix("weight", tuple(CODES))
    dtype = CODES[layer.find("weight").dtype]
    rows, columns = (1, inputs) if block is None else (min(block[0], outputs), min(block[1], inputs))
    grid = (-(-outputs // rows), -(-inputs // columns))
    single = [(), (1,), (1, 1)]
    layer.expect(leaf, (*SCALES, "F8_E8M0"), grid, *single, *([(outputs,)] if block is None else []))

    def scale() -> Tensor:
        """(outputs, groups)"""
        values = layer.scales(leaf).float()
        if values.numel() == 1:
            return values.reshape(1, 1).repeat(outputs, 1)
        return values.view(grid).repeat_interleave(rows, 0)[:outputs]

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

    one = grid[1] == 1 or layer.find(leaf).shape in single
    if not one and inputs % columns:
        return other_weight(shape, dequantize, f"blocks of {columns} do not divide its {inputs} inputs")
    return exact_weight(Float(dtype, "channel" if one else columns), shape, stored)  # ty: ignore[invalid-argument-type]
