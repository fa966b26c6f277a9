"""The adapters of a model: adding, activating, merging and unmerging them.

A model can have several adapters with different names. At most one is active, and only its parameters are trainable.
Merging computes the adapted weight once, W + (α / r) B A; the merged model is as fast as the original.
"""

import re
from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.utils import parametrize

from regard.adapt.lora import LoRA, LoRALayer, LoRALinear, LoRAWeight
from regard.adapt.pissa import INIT
from regard.adapt.quantized import QuantizedLinear, dequantize_linears, quantized_layer
from regard.adapt.targets import (
    ALL_LINEAR,
    AdaptableWeight,
    AdapterError,
    adaptable_weights,
    check_module,
    original_parameter,
    select_weights,
)
from regard.adapt.w8a8 import W8A8Linear
from regard.formats.base import NumberFormat
from regard.parts.experts import GroupedLinear
from regard.spec import SpecError

DEFAULT = "default"
PARAMETRIZATIONS = ".parametrizations."


def add_lora(model: nn.Module, lora: LoRA, seed: int | None = None, name: str = DEFAULT) -> list[str]:
    """Add an adapter, make it active, and freeze all other parameters; returns the names of the adapted layers."""
    return add_lora_to(model, select_weights(model, lora.targets), lora, seed, name)


def quantize_base(model: nn.Module, format: NumberFormat) -> None:
    """Store the weights of all linear layers but the head in a number format. Everything is checked before."""
    weights = select_weights(model, ALL_LINEAR)
    for name, weight in weights.items():
        if isinstance(weight.layer, QuantizedLinear) and weight.layer.format != format:
            raise AdapterError(f"lora: {name} is stored as {weight.layer.format}, not as {format}; use the same base")
        if weight.parameter:
            raise AdapterError(f"lora: {name} is a stacked weight, which base={format} cannot store; leave base out")
        try:
            format.check_shape(weight.shape[-2:])
        except SpecError as error:
            raise AdapterError(f"lora: base of {name}: {error}") from error
    for weight in weights.values():
        if isinstance(weight.layer, nn.Linear | GroupedLinear):
            quantized = quantized_layer(weight.layer, format).train(weight.layer.training)
            for path in weight.names:
                place = f"{path}.base" if isinstance(weight.module, LoRALinear) else path
                model.set_submodule(place, quantized)


def add_lora_to(
    model: nn.Module, weights: dict[str, AdaptableWeight], lora: LoRA, seed: int | None = None, name: str = DEFAULT
) -> list[str]:
    """`add_lora` for weights that are already selected."""
    check_new_adapter(model, weights, lora, name)
    if lora.base is not None:
        quantize_base(model, lora.base)
        quantized = adaptable_weights(model)
        weights = {layer: quantized[layer] for layer in weights}
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        for weight in weights.values():
            add_adapter(model, weight, lora, name)
    set_adapter(model, name)
    return [layer for weight in weights.values() for layer in weight.names]


def check_new_adapter(model: nn.Module, weights: dict[str, AdaptableWeight], lora: LoRA, name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise AdapterError(f"lora: {name!r} is not a name for an adapter; use letters, digits, - and _")
    if hasattr(nn.ModuleDict(), name):  # the adapters of a layer are in a ModuleDict, under their names
        raise AdapterError(f"lora: {name!r} is an attribute of PyTorch's modules; choose another name for the adapter")
    if name in adapter_names(model):
        raise AdapterError(f"this model already has an adapter named {name!r}; merge it, or choose another name")
    stacked = [layer for layer, weight in weights.items() if weight.stacked]
    if lora.dropout and stacked:
        raise AdapterError(
            f"lora: dropout={lora.dropout} does not work for stacked weights ({stacked[0]}); set it to 0"
        )
    if lora.dora and stacked:
        raise AdapterError(
            f"lora: dora does not work for stacked weights ({stacked[0]}), as in PEFT; leave it out, or name other "
            "targets"
        )
    if lora.init != INIT:
        check_principal_rank(weights, lora.rank)


def check_principal_rank(weights: dict[str, AdaptableWeight], rank: int) -> None:
    for layer, weight in weights.items():
        if rank > (largest := min(weight.shape[-2:])):
            raise AdapterError(
                f"lora: rank={rank} is larger than the number of singular values of {layer}, {largest}; choose a "
                "smaller rank, another init, or other targets"
            )


def add_adapter(model: nn.Module, weight: AdaptableWeight, lora: LoRA, name: str) -> None:
    """Add the adapter to one weight, at all of its names."""
    module = weight.module
    if weight.parameter:
        layer = existing_adapter(module, weight.parameter) or LoRAWeight()
        layer.add(name, lora, weight.weight)
        for path in weight.names:
            owner = model.get_submodule(path.rpartition(".")[0])
            if existing_adapter(owner, weight.parameter) is None:
                parametrize.register_parametrization(owner, weight.parameter, layer.train(owner.training))
        return
    if not isinstance(module, LoRALinear):
        assert isinstance(module, nn.Linear | GroupedLinear | QuantizedLinear)
        module = LoRALinear(module).train(module.training)
    module.add(name, lora, weight.weight)
    for path in weight.names:
        if model.get_submodule(path) is not module:
            model.set_submodule(path, module)


def existing_adapter(module: nn.Module, parameter: str) -> LoRAWeight | None:
    parametrizations = getattr(module, "parametrizations", {})
    return parametrizations[parameter][0] if parameter in parametrizations else None


def adapters(model: nn.Module) -> dict[str, LoRALayer]:
    """The adapted layers by name; a layer with several names is listed once, under its first."""
    return {paths[0]: layer for layer, paths in adapter_paths(model).items()}


def adapter_paths(model: nn.Module) -> dict[LoRALayer, list[str]]:
    """The adapted layers with all their names; for a stacked parameter, the names of the parameter."""
    check_module(model)
    found: dict[LoRALayer, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, LoRALayer):
            owner, parametrized, parameter = f".{path}".rpartition(PARAMETRIZATIONS)
            name = f"{owner}.{parameter.removesuffix('.0')}".removeprefix(".") if parametrized else path
            found.setdefault(module, []).append(name)
    return found


def adapter_names(model: nn.Module) -> list[str]:
    """The names of the model's adapters, in the order in which they were added."""
    return list(dict.fromkeys(name for layer in adapters(model).values() for name in layer.loras))


def set_adapter(model: nn.Module, name: str | None) -> None:
    """Activate one adapter and make only its parameters trainable; None: compute as without adapters."""
    if name is not None:
        check_adapter(model, name)
    for layer in adapters(model).values():
        layer.active = name
        for key, parameter in layer.trained():
            parameter.requires_grad_(key == name)


@contextmanager
def disable_adapters(model: nn.Module) -> Generator[None]:
    """Compute without adapters inside the block, for example the log-probabilities of the reference model.

    The logits are bitwise those of the model before `add_lora`. Which parameters are trainable does not change, and
    the end of the block activates the same adapters again, also after an exception. The CUDA graphs of an engine keep
    the adapter that was active when they were captured.
    """
    layers = adapters(model)
    if not layers:
        raise AdapterError("disable_adapters: this model has no LoRA adapters; add or load some first")
    active = {layer: layer.active for layer in layers.values()}
    try:
        for layer in active:
            layer.active = None
        yield
    finally:
        for layer, name in active.items():
            layer.active = name


def check_adapter(model: nn.Module, name: str) -> None:
    names = adapter_names(model)
    if name not in names:
        raise AdapterError(f"this model has no adapter named {name!r}; it has {', '.join(names) or 'none'}")


def resolve_adapter(model: nn.Module, name: str | None, action: str) -> str:
    """The adapter of this name, else the active one, else the only one."""
    names = adapter_names(model)
    if not names:
        raise AdapterError(f"this model has no LoRA adapters to {action}; add or load some first")
    if name is not None:
        check_adapter(model, name)
        return name
    active = [layer.active for layer in adapters(model).values() if layer.active is not None]
    if not active and len(names) > 1:
        raise AdapterError(f"no adapter is active; name the one to {action}: {', '.join(names)}")
    return active[0] if active else names[0]


def merge_lora(model: nn.Module, name: str | None = None) -> dict[str, LoRALayer]:
    """Merge one adapter, by default the active one, into the weights, and remove all adapters from the model.

    A base that is stored in few bits (QLoRA) becomes one of ordinary linear layers.

    Returns the adapted layers by name, for `unmerge_lora`.
    """
    name = resolve_adapter(model, name, "merge")
    check_exact_inputs(model)
    layers = adapter_paths(model)
    check_untied(model, layers, name)
    for layer, paths in layers.items():
        if isinstance(layer, LoRAWeight):
            merge_parameter(model, layer, paths, name)
        else:
            assert isinstance(layer, LoRALinear)
            merged = layer.merged(name)
            layer.keep_merged(merged)
            for path in paths:
                model.set_submodule(path, merged)
    dequantize_linears(model)  # those without an adapter
    return {path: layer for layer, paths in layers.items() for path in paths}


def check_exact_inputs(model: nn.Module) -> None:
    """Raise AdapterError if layers round their inputs: the ordinary layers that merging makes would not."""
    for name, module in model.named_modules():
        if isinstance(module, W8A8Linear):
            raise AdapterError(
                f"{name} rounds its inputs to int8 (W8A8), which a merged layer would not; keep the adapter apart, or "
                "merge it into the model that was quantized, and quantize that again"
            )


def merge_parameter(model: nn.Module, layer: LoRAWeight, paths: list[str], name: str) -> None:
    layer.keep_original(original_parameter(*owner_of(model, paths[0])))
    merged = layer.merged(name)
    layer.keep_merged(merged)
    for path in paths:
        owner, parameter = owner_of(model, path)
        parametrize.remove_parametrizations(owner, parameter, leave_parametrized=False)
        setattr(owner, parameter, merged)


def unmerge_lora(model: nn.Module, merged: dict[str, LoRALayer]) -> None:
    """Restore the adapted layers that `merge_lora` returned; their weights were not changed, so this is exact.

    A layer that is already restored is left as it is. Raises AdapterError, and changes nothing, if the model got other
    adapters since the merge, or if a merged layer was replaced.
    """
    check_module(model)
    missing = {path: layer for path, layer in merged.items() if not is_restored(model, path, layer)}
    if missing:
        check_no_new_adapters(model, set(merged.values()))
        check_merged(model, missing)
    for path, layer in missing.items():
        if isinstance(layer, LoRAWeight):
            owner, parameter = owner_of(model, path)
            setattr(owner, parameter, layer.original)
            parametrize.register_parametrization(owner, parameter, layer.train(owner.training))
        else:
            model.set_submodule(path, layer.train(model.get_submodule(path).training))


def is_restored(model: nn.Module, path: str, layer: LoRALayer) -> bool:
    owner, name = owner_of(model, path)
    return (existing_adapter(owner, name) if isinstance(layer, LoRAWeight) else getattr(owner, name)) is layer


def check_no_new_adapters(model: nn.Module, merged: set[LoRALayer]) -> None:
    new = [name for layer in adapters(model).values() if layer not in merged for name in layer.loras]
    if new:
        raise AdapterError(
            f"unmerge_lora: the adapter {new[0]!r} was added after the merge and acts on the merged weights; unmerge "
            "before adding another adapter"
        )


def check_merged(model: nn.Module, merged: dict[str, LoRALayer]) -> None:
    """Raise AdapterError if the model's layers are not those that `merge_lora` made."""
    for path, layer in merged.items():
        owner, name = owner_of(model, path)
        if getattr(owner, name) is not layer.merged_into:
            raise AdapterError(
                f"unmerge_lora: {path} was replaced or merged again after this merge, or the model is a copy; unmerge "
                "the model that was merged, and the latest merge first"
            )


def owner_of(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    """The module that holds a parameter, and the parameter's name in it."""
    owner, _, parameter = path.rpartition(".")
    return model.get_submodule(owner), parameter


def check_untied(model: nn.Module, layers: dict[LoRALayer, list[str]], name: str) -> None:
    """Raise AdapterError if a weight to be merged is also used where the adapter does not apply."""
    uses: dict[int, list[str]] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        uses.setdefault(id(parameter), []).append(path)
    for layer, paths in layers.items():
        if name not in layer.loras or isinstance(getattr(layer, "base", None), QuantizedLinear):
            continue
        if isinstance(layer, LoRALinear):
            weight, adapted = layer.base.weight, [f"{path}.base.weight" for path in paths]
        else:
            weight = original_parameter(*owner_of(model, paths[0]))
            split = [f".{path}".rpartition(".") for path in paths]
            adapted = [f"{owner}{PARAMETRIZATIONS}{name}.original".removeprefix(".") for owner, _, name in split]
        if set(tied := uses[id(weight)]) != set(adapted):
            raise AdapterError(
                f"{paths[0]} cannot be merged: its weight is tied ({' = '.join(tied)}) and the adapter is not; "
                "build the model with tied=False, or leave this layer out of the targets"
            )
