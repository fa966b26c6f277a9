"""The matrices of a LoRA adapter by layer, without a model: what an engine with many adapters loads.

An adapter is read into a copy of the model's modules that shares all weights, so that the checks are those of
`load_adapter`, and the model itself is not changed.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.adapt.adapters import adapter_paths, adapters, merge_lora, resolve_adapter
from regard.adapt.foreign_adapters import has_foreign_names, load_foreign_adapter
from regard.adapt.lora import LoRALinear, LoRAWeight
from regard.adapt.peft import add_stored_adapter, check_no_head, read_base_format
from regard.adapt.targets import AdapterError, check_module
from regard.weights.table import Table


class LayerMatrices(NamedTuple):
    a: Tensor  # (r, in), for experts (X, r, in)
    b: Tensor  # (out, r), for experts (X, out, r); of DoRA with the factors of the outputs
    gain: Tensor | None = None  # (out,) of DoRA: the factors of the outputs of the layer


@dataclass(frozen=True)
class LoraWeights:
    layers: dict[str, LayerMatrices]  # by the first name of the layer
    rank: int
    scale: float  # α / r, or α / √r


def lora_weights(model: nn.Module, name: str | None = None) -> LoraWeights:
    """The matrices of a model's adapter, by default of the active one."""
    check_module(model)
    name = resolve_adapter(model, name, "read")
    layers, specs = {}, []
    for layer, paths in adapter_paths(model).items():
        if name in layer.loras:
            if isinstance(layer, LoRAWeight):
                raise AdapterError(
                    f"{paths[0]} is a stacked parameter, whose adapter cannot be mixed with others in a batch; merge "
                    "this adapter (--adapter), or train one of linear layers only"
                )
            assert isinstance(layer, LoRALinear)
            layers[paths[0]] = layer_matrices(layer, name)
            specs.append(layer.loras[name].of_original)
    return LoraWeights(layers, specs[0].rank, specs[0].scale)


@torch.no_grad()
def layer_matrices(layer: LoRALinear, name: str) -> LayerMatrices:
    a, b = layer.matrices(name)
    if not layer.loras[name].dora:
        return LayerMatrices(a, b)
    gain = layer.gain(layer.base.weight, name)
    return LayerMatrices(a, (gain.unsqueeze(-1) * b).to(b.dtype), gain)


def read_lora(model: nn.Module, folder: Path | str, table: Callable[[], Table]) -> LoraWeights:
    """The adapter of a folder for this model. table: the names of the model's family, if the adapter has those."""
    check_no_head(Path(folder))
    if (base := read_base_format(Path(folder))) is not None:
        raise AdapterError(
            f"the adapter in {folder} was trained on weights stored as {base.kind}, and this model has others; "
            f"load both by the name of the folder, in Python regard.load({str(folder)!r})"
        )
    scratch = without_gradients(model)
    add_lora_of_folder(scratch, Path(folder), table)
    return lora_weights(scratch)


def add_lora_of_folder(model: nn.Module, folder: Path, table: Callable[[], Table]) -> None:
    """Add the adapter of a folder. Its layers have our names, or those of the model's family.

    An adapter that the model has already is merged: the new one was trained on both.
    """
    if adapters(model):
        merge_lora(model)
    if has_foreign_names(model, folder):
        load_foreign_adapter(model, folder, table())
    else:
        add_stored_adapter(model, folder)


def without_gradients(model: nn.Module) -> nn.Module:
    """A copy of the modules that shares all tensors and has parameters of its own, so that these can be frozen."""
    memo: dict[int, object] = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()}
    memo |= {id(buffer): buffer for buffer in model.buffers()}
    with torch.inference_mode(False):
        return deepcopy(model, memo)
