"""The files of bitsandbytes (Dettmers et al. 2022, 2023): NF4 and FP4 in blocks, and LLM.int8.

    weight                     two codes per byte, the first in the high bits; all outputs in a row
    weight.quant_map           the level of each of the 16 codes
    weight.absmax              the scale of every block; with double quantization codes of eight bits:
                               absmax = nested_quant_map[code] · nested_absmax + nested_offset
    weight.quant_state.…       JSON: the shape, the sizes of blocks, nested_offset

    weight (int8), SCB         W = weight · SCB / 127, one scale per output

FP4 and other levels than those of our NF4 are dequantized. LLM.int8 multiplies inputs above a threshold in full
precision and the others in eight bits; here all of them are in full precision.
"""

import json
import math
from typing import Any

import torch
from torch import Tensor

from regard.checkpoint.foreign_quantized.layer import ForeignWeight, LayerFiles, exact_weight, other_weight
from regard.families.common.config_reader import Config
from regard.formats.integers import Integer
from regard.formats.nf4 import NF4, SCALE_BLOCK, dynamic_levels, normal_levels

STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
LEAVES = (
    *STATES, "weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map", "SCB",
    "weight_format",
)  # fmt: skip
STORAGE = {"U8": 1, "BF16": 2, "F16": 2, "F32": 4}  # bnb_4bit_quant_storage: the dtype that the bytes are saved as
MAX_STATE = 1 << 16  # bytes


def check(config: Config) -> None:
    if not (config.flag("load_in_4bit", False) or config.flag("load_in_8bit", False)):
        rule = "and load_in_8bit=False: nothing is quantized; remove quantization_config from config.json"
        raise config.error("load_in_4bit", False, rule)


def open_layer(layer: LayerFiles, config: Config) -> ForeignWeight:
    return open_int8(layer) if "SCB" in layer else open_4bit(layer)


def open_int8(layer: LayerFiles) -> ForeignWeight:
    shape = layer.matrix("weight", ("I8",))
    layer.expect("SCB", ("F32",), (shape[0],))
    if "weight_format" in layer and layer.small("weight_format", ("U8",), ()).item():
        layer.refuse("weight_format", "should be 0, the order of rows", found="")

    def stored() -> dict[str, Tensor]:
        codes = layer.find("weight").read().view(torch.uint8) ^ 128
        return {"codes": codes, "scale": layer.scales("SCB").unsqueeze(-1) / 127}

    return exact_weight(Integer(8), shape, stored)


def open_4bit(layer: LayerFiles) -> ForeignWeight:
    state = read_state(layer)
    (outputs, inputs), nested = state["shape"], "nested_blocksize" in state
    count = outputs * inputs
    block = min(state["blocksize"], count)
    blocks = -(-count // block)
    nested_block = min(state.get("nested_blocksize", SCALE_BLOCK), max(blocks, SCALE_BLOCK))
    weight = layer.find("weight")
    if weight.dtype not in STORAGE or 2 * math.prod(weight.shape) * STORAGE[weight.dtype] != count or inputs % 2:
        layer.refuse("weight", f"should have the {count // 2} bytes of {outputs} × {inputs} codes")
    layer.expect("weight.quant_map", ("F32",), (16,))
    levels = layer.scales("weight.quant_map")
    layer.expect("weight.absmax", ("U8" if nested else "F32",), (blocks,))
    scale_levels = None
    if nested:
        layer.expect("weight.nested_absmax", ("F32",), (-(-blocks // nested_block),))
        layer.expect("weight.nested_quant_map", ("F32",), (256,))
        scale_levels = layer.scales("weight.nested_quant_map")

    def codes() -> Tensor:
        pairs = weight.read().flatten().view(torch.uint8).view(outputs, -1)
        return pairs >> 4 | pairs << 4

    def scales() -> Tensor:
        """The scale of every block."""
        if scale_levels is None:
            return layer.scales("weight.absmax")
        factors = layer.scales("weight.nested_absmax").repeat_interleave(nested_block)[:blocks]
        return scale_levels[layer.find("weight.absmax").read().int()] * factors + state["nested_offset"]

    def stored() -> dict[str, Tensor]:
        if not nested:
            return {"codes": codes(), "scale": layer.scales("weight.absmax")}
        return {
            "codes": codes(),
            "scale": layer.find("weight.absmax").read(),
            "scale_scale": layer.scales("weight.nested_absmax"),
            "scale_mean": torch.tensor([state["nested_offset"]], dtype=torch.float32),
        }

    def dequantize(dtype: torch.dtype) -> Tensor:
        packed = codes()
        values = levels[torch.stack([packed & 15, packed >> 4], -1).flatten().int()]
        return (values * scales().repeat_interleave(block)[:count]).view(outputs, inputs).to(dtype)

    if not torch.equal(levels, normal_levels()):
        return other_weight((outputs, inputs), dequantize, f"its levels are those of {state.get('quant_type')!r:.20}")
    if count % block or block % 2:
        return other_weight((outputs, inputs), dequantize, f"its blocks of {block} are not whole and even")
    if scale_levels is not None and not (nested_block == SCALE_BLOCK and torch.equal(scale_levels, dynamic_levels())):
        return other_weight((outputs, inputs), dequantize, "its scales have levels of their own")
    return exact_weight(NF4(block, nested), (outputs, inputs), stored)


def read_state(layer: LayerFiles) -> dict[str, Any]:
    """The JSON of quant_state, checked."""
    leaf = next((leaf for leaf in STATES if leaf in layer), STATES[0])
    tensor = layer.find(leaf)
    if tensor.dtype != "U8" or len(tensor.shape) != 1 or tensor.shape[0] > MAX_STATE:
        layer.refuse(leaf, f"should have at most {MAX_STATE} bytes")
    try:
        state = json.loads(bytes(tensor.read().tolist()).decode("utf-8"))
    except (ValueError, RecursionError):
        layer.refuse(leaf, "is not valid JSON", found="")
    if not isinstance(state, dict):
        layer.refuse(leaf, "is not a JSON object", found="")
    shape, sizes = state.get("shape"), [state.get("blocksize")]
    if "nested_blocksize" in state:
        sizes.append(state["nested_blocksize"])
        offset = state.get("nested_offset")
        if not isinstance(offset, float) or not abs(offset) <= torch.finfo(torch.float32).max:
            layer.refuse(leaf, f"should have a nested_offset that float32 holds, found {offset!r:.40}", found="")
    two = isinstance(shape, list) and len(shape) == 2
    if not two or not all(type(n) is int and 0 < n < 1 << 31 for n in (*shape, *sizes)):
        layer.refuse(leaf, f"should have a shape of two sizes and a blocksize, found {state!r:.120}", found="")
    return state
