"""Write quantized layers in the layout of compressed-tensors (compressed_tensors.py says what it is).

    integers                    pack-quantized; with inputs of eight bits int-quantized
    FP8 (e4m3)                  float-quantized

Scales are written in the dtype of the model's other weights, or a wider one that holds them: transformers multiplies
codes in the dtype of the scales.
"""

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.checkpoint.foreign_quantized.compressed_tensors import words
from regard.checkpoint.foreign_quantized.compressed_tensors_config import PER_TOKEN
from regard.checkpoint.foreign_quantized.layer import WrittenLayer, refuse
from regard.formats.base import pack_bits
from regard.formats.floats import Float
from regard.formats.integers import Integer


def write(layers: Sequence[WrittenLayer], ignored: Sequence[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors by name, and `quantization_config`. ignored: names of linear layers with ordinary weights."""
    tensors: dict[str, Tensor] = {}
    groups: dict[str, tuple[dict[str, Any], list[str]]] = {}  # layers of one scheme, by its JSON
    for layer in layers:
        leaves, scheme = write_layer(layer)
        tensors |= {f"{layer.name}.{leaf}": tensor for leaf, tensor in leaves.items()}
        groups.setdefault(json.dumps(scheme), (scheme, []))[1].append(layer.name)
    layouts = {scheme["format"] for scheme, _ in groups.values()}
    settings = {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": layouts.pop() if len(layouts) == 1 else "mixed-precision",
        "config_groups": {
            f"group_{n}": {"targets": ["Linear"] if len(groups) == 1 else names, **scheme}
            for n, (scheme, names) in enumerate(groups.values())
        },
        "ignore": list(ignored),
        "kv_cache_scheme": None,
    }
    return tensors, settings


def write_layer(layer: WrittenLayer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a layer by the last part of their names, and its scheme."""
    if not isinstance(layer.format, Integer | Float):
        refuse(layer.source, layer.format, "compressed-tensors does not have this format")
    scale = layer.stored["scale"].to(torch.promote_types(layer.stored["scale"].dtype, layer.dtype))
    scale = scale.unsqueeze(-1) if scale.dim() == 1 else scale
    strategy: dict[str, Any] = {"strategy": "channel"}
    if isinstance(layer.format.group, int):
        strategy = {"strategy": "group", "group_size": layer.format.group}
    if isinstance(layer.format, Float):
        if layer.format.dtype != "float8_e4m3fn":
            fault = f"the FP8 of compressed-tensors is float8_e4m3fn, not {layer.format.dtype}"
            refuse(layer.source, layer.format, fault)
        weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, **strategy}
        scheme = {"format": "float-quantized", "weights": weights, "input_activations": None}
        return {"weight": layer.stored["codes"], "weight_scale": scale}, scheme
    bits, symmetric = layer.format.bits, layer.format.symmetric
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False, **strategy}
    if layer.int8_inputs:
        codes = (layer.stored["codes"] ^ 128).view(torch.int8)
        scheme = {"format": "int-quantized", "weights": weights, "input_activations": dict(PER_TOKEN)}
        return {"weight": codes, "weight_scale": scale}, scheme
    leaves = {
        "weight_packed": as_words(layer.stored["codes"], words(layer.shape[1], bits)),
        "weight_shape": torch.tensor(layer.shape),
        "weight_scale": scale,
    }
    if not symmetric:
        leaves["weight_zero_point"] = pack_zeros(layer, bits)
    return leaves, {"format": "pack-quantized", "weights": weights, "input_activations": None}


def as_words(packed: Tensor, count: int) -> Tensor:
    """Rows of bytes as rows of words of 32 bits, filled up with zeros."""
    return F.pad(packed, (0, 4 * count - packed.shape[1])).flatten().view(torch.int32).view(len(packed), count)


def pack_zeros(layer: WrittenLayer, bits: int) -> Tensor:
    """(words of outputs, groups)"""
    zero = layer.stored["zero"]  # (outputs, groups)
    if int(zero.max()) >= 1 << bits:
        refuse(layer.source, layer.format, f"a zero point of {int(zero.max())} has more than {bits} bits")
    columns = F.pad(zero.t(), (0, -len(zero) % 8)).contiguous()  # eight codes fill `bits` bytes
    count = words(len(zero), bits)
    return as_words(pack_bits(columns, bits)[:, : 4 * count], count).t()
