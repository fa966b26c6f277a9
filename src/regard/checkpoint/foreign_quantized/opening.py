"""Open a Hugging Face folder whose config.json has a `quantization_config`.

Every quantized layer becomes one tensor, NAME.weight, which the weight tables of the families read like any other: its
numbers are dequantized when it is read. It also knows the format of ours that holds its codes (keep_codes.py). Layers
that the config leaves out (`modules_to_not_convert`, `ignore`) are those with an ordinary weight in the files.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.checkpoint.atomic_folder import CheckpointError
from regard.checkpoint.foreign_quantized import (
    awq,
    bitsandbytes,
    compressed_tensors,
    compressed_tensors_config,
    gptq,
    scaled_floats,
)
from regard.checkpoint.foreign_quantized.layer import ForeignWeight, LayerFiles
from regard.checkpoint.safetensors_header import Cast
from regard.checkpoint.weight_files import open_tensors
from regard.families.common.config_reader import Config
from regard.weights.table import FLOATS, StoredTensor

KEY = "quantization_config"
PACKED = ("qweight", "weight_packed")  # the weight of a layer, instead of `weight`
UNUSED = (  # for rounding inputs, outputs and the cache
    "input_scale", "input_zero_point", "input_global_scale", "input_scale_ub", "activation_scale", "output_scale",
    "output_zero_point", "k_scale", "v_scale", "q_scale", "prob_scale",
)  # fmt: skip


@dataclass(frozen=True)
class ForeignMethod:
    """markers: the last parts of names that only quantized layers have. leaves: all parts of such a layer."""

    markers: tuple[str, ...]
    leaves: tuple[str, ...]
    check: Callable[[Config], None]
    open_layer: Callable[[LayerFiles, Config], ForeignWeight]


FP8 = ForeignMethod(scaled_floats.SCALE_LEAVES, scaled_floats.LEAVES, scaled_floats.check, scaled_floats.open_layer)
METHODS = {
    "gptq": ForeignMethod(("qweight",), gptq.LEAVES, gptq.check, gptq.open_layer),
    "awq": ForeignMethod(("qweight",), awq.LEAVES, awq.check, awq.open_layer),
    "bitsandbytes": ForeignMethod(
        ("SCB", *bitsandbytes.STATES), bitsandbytes.LEAVES, bitsandbytes.check, bitsandbytes.open_layer
    ),
    "fp8": FP8,
    "fbgemm_fp8": FP8,
    "compressed-tensors": ForeignMethod(
        ("weight_packed", "weight_scale"), compressed_tensors.LEAVES, compressed_tensors_config.check,
        compressed_tensors.open_layer,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class QuantizedTensor(StoredTensor):
    """A weight that is dequantized when it is read."""

    weight: ForeignWeight


def find_method(folder: Path, config: Mapping[str, Any]) -> tuple[ForeignMethod, Config] | None:
    """How the folder is quantized, with its settings checked; None if it is not."""
    settings = config.get(KEY)
    if settings is None:
        return None
    name = settings.get("quant_method") if isinstance(settings, dict) else settings
    if not isinstance(settings, dict) or not isinstance(name, str) or name not in METHODS:
        raise CheckpointError(
            f"{folder}: config.json has {KEY} with the method {name!r:.80}, which is not read; the methods that are "
            f"read are {', '.join(METHODS)}. Use the original folder or a GGUF file of the model, or dequantize it: "
            "load it in transformers, call model.dequantize() and model.save_pretrained(), and remove "
            f"{KEY} from the new config.json"
        )
    reader = Config(KEY, settings)
    METHODS[name].check(reader)
    return METHODS[name], reader


def open_quantized(
    folder: Path, config: Mapping[str, Any], plain: Mapping[str, StoredTensor], cast: Cast, mmap: bool = False
) -> dict[str, StoredTensor]:
    """The tensors of the folder with those of every quantized layer replaced by one weight.

    plain: all tensors of the folder. cast: from the dtype of the model in its config to that of the weights.
    """
    found = find_method(folder, config)
    if found is None:
        return dict(plain)
    method, settings = found
    name = config.get("dtype") or config.get("torch_dtype")
    dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS.values()}
    dtype = cast(dtypes.get(name, torch.float32) if isinstance(name, str) else torch.float32)
    layers = group_by_layer(open_tensors(folder, lambda stored: stored, mmap), method)
    result = dict(plain)
    unused = [name for name in plain if name.rpartition(".")[2] in UNUSED]
    for path, tensors in layers.items():
        layer = LayerFiles(path, tensors)
        if f"{path}.weight" in plain and (packed := next((leaf for leaf in PACKED if leaf in layer), None)):
            layer.refuse(packed, f"is stored beside {path}.weight, but a layer has one weight", found="")
        weight = method.open_layer(layer, settings)
        for leaf in tensors:
            del result[f"{path}.{leaf}"]
        file = next(iter(tensors.values())).file
        dtype_name = next(name for name, value in FLOATS.items() if value == dtype)
        read = partial(read_weight, weight, dtype)
        result[f"{path}.weight"] = QuantizedTensor(file, weight.shape, dtype_name, read, weight)
    for scale in unused:
        result.pop(scale, None)
    if unused:
        warnings.warn(
            f"{folder}: {len(unused)} tensors such as {unused[0]} are not used, because inputs of layers and the cache "
            "are not rounded with stored scales; products are in full precision",
            stacklevel=4,
        )
    return result


def group_by_layer(found: Mapping[str, StoredTensor], method: ForeignMethod) -> dict[str, dict[str, StoredTensor]]:
    """The tensors of every quantized layer by their last parts."""
    layers: dict[str, dict[str, StoredTensor]] = {}
    for marker in method.markers:
        for name in found:
            if name.endswith(f".{marker}"):
                layers.setdefault(name.removesuffix(f".{marker}"), {})
    for path, tensors in layers.items():
        for leaf in method.leaves:
            if f"{path}.{leaf}" in found:
                tensors[leaf] = found[f"{path}.{leaf}"]
    return layers


def read_weight(weight: ForeignWeight, dtype: torch.dtype) -> Tensor:
    return weight.dequantize(torch.promote_types(dtype, torch.float32)).to(dtype)
