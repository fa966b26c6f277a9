"""Write NF4 layers in the layout of bitsandbytes (bitsandbytes.py says what it is)."""

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regard.checkpoint.foreign_quantized.layer import WrittenLayer, refuse
from regard.formats.nf4 import NF4, SCALE_BLOCK, dynamic_levels, normal_levels

BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # that the library has kernels for


def write(layers: Sequence[WrittenLayer], ignored: Sequence[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors by name, and `quantization_config`. ignored: names of linear layers with ordinary weights."""
    tensors = {f"{layer.name}.{leaf}": tensor for layer in layers for leaf, tensor in write_layer(layer).items()}
    settings = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": all(layer.stored["scale"].dtype == torch.uint8 for layer in layers),
        "bnb_4bit_compute_dtype": str(layers[0].dtype).removeprefix("torch."),
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": list(ignored),
    }
    return tensors, settings


def write_layer(layer: WrittenLayer) -> dict[str, Tensor]:
    """The tensors of a layer by the last part of their names."""
    format, stored = layer.format, layer.stored
    assert isinstance(format, NF4), "the caller has chosen NF4 layers"
    if format.block not in BLOCKS:
        blocks = ", ".join(map(str, BLOCKS))
        refuse(layer.source, format, f"bitsandbytes has blocks of {blocks}, not of {format.block}")
    codes = stored["codes"]
    state: dict[str, Any] = {
        "quant_type": "nf4",
        "blocksize": format.block,
        "dtype": str(layer.dtype).removeprefix("torch."),
        "shape": list(layer.shape),
    }
    leaves = {
        "weight": (codes >> 4 | codes << 4).view(-1, 1),
        "weight.absmax": stored["scale"].flatten(),
        "weight.quant_map": normal_levels().clone(),
    }
    if format.double:
        state |= {
            "nested_blocksize": SCALE_BLOCK,
            "nested_dtype": "float32",
            "nested_offset": stored["scale_mean"].item(),
        }
        leaves |= {
            "weight.nested_absmax": stored["scale_scale"],
            "weight.nested_quant_map": dynamic_levels().clone(),
        }
    text = json.dumps(state).encode()
    return leaves | {"weight.quant_state.bitsandbytes__nf4": torch.tensor(list(text), dtype=torch.uint8)}
