"""The weights that LoRA can adapt, and how targets select them.

    nn.Linear, QuantizedLinear     one matrix
    GroupedLinear                  one matrix per expert
    a stacked parameter            one matrix per head; a module lists their names in `adaptable_parameters`

A target is the name of such a weight or the last components of it. "all-linear" selects all of them except the model's
head and the layers that run in training only. Layers that share a weight (Repeat.tied) are one weight with several
names, and the targets must select all of them, because they share the adapter too.
"""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor, nn

from regard.adapt.lora import LoRALayer, LoRALinear, Targets
from regard.adapt.quantized import QuantizedLinear
from regard.parts.experts import GroupedLinear
from regard.spec import suggest_name

ALL_LINEAR = "all-linear"


class AdapterError(ValueError):
    """An adapter that does not fit the model."""


@dataclass
class AdaptableWeight:
    module: nn.Module
    parameter: str = ""  # the name of a stacked parameter of the module; "": the module is linear
    names: list[str] = field(default_factory=list)  # all names in the model; several if it is shared

    @property
    def weight(self) -> Tensor:
        """The weight without adapters."""
        if self.parameter:
            return original_parameter(self.module, self.parameter)
        assert isinstance(self.layer, nn.Linear | GroupedLinear | QuantizedLinear)
        return self.layer.weight

    @property
    def layer(self) -> nn.Module:
        """The module without adapters."""
        return self.module.base if isinstance(self.module, LoRALinear) else self.module

    @property
    def shape(self) -> tuple[int, ...]:
        if isinstance(self.layer, QuantizedLinear):  # whose weight would have to be read from its format
            return self.layer.shape
        return tuple(self.weight.shape)

    @property
    def stacked(self) -> bool:
        return len(self.shape) == 3


def check_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise AdapterError(
            f"adapters need an nn.Module, found {type(model).__name__}; of a LanguageModel, pass the model: llm.model"
        )


def adaptable_weights(model: nn.Module) -> dict[str, AdaptableWeight]:
    """The weights that LoRA can adapt, by their first names; adapted ones under the names that they had before."""
    check_module(model)
    found: dict[object, AdaptableWeight] = {}
    inside_adapters = {
        child for module in model.modules() if isinstance(module, LoRALayer) for child in module.children()
    }
    inside_adapters = {child for module in inside_adapters for child in module.modules()}
    for path, module in model.named_modules(remove_duplicate=False):
        if module in inside_adapters:
            continue
        linear = module.base if isinstance(module, LoRALinear) else module
        if isinstance(linear, nn.Linear | GroupedLinear | QuantizedLinear):
            key = id(linear) if isinstance(linear, QuantizedLinear) else (id(linear.weight), id(linear.bias))
            found.setdefault(key, AdaptableWeight(module)).names.append(path)
        for name in getattr(module, "adaptable_parameters", ()):
            key = id(original_parameter(module, name))
            found.setdefault(key, AdaptableWeight(module, name)).names.append(f"{path}.{name}".lstrip("."))
    return {weight.names[0]: weight for weight in found.values()}


def original_parameter(module: nn.Module, name: str) -> nn.Parameter:
    """The parameter of this name, without its parametrization."""
    parametrizations = getattr(module, "parametrizations", None)
    if parametrizations is not None and name in parametrizations:
        return parametrizations[name].original
    return getattr(module, name)


def select_weights(model: nn.Module, targets: Targets) -> dict[str, AdaptableWeight]:
    """The weights that the targets select.

    Raises AdapterError if a target selects none, if the targets select only some of the names of a weight, or if all
    selected layers run in training only; warns if a single target selects only such layers.
    """
    weights = adaptable_weights(model)
    names = [name for weight in weights.values() for name in weight.names]
    training_prefixes = training_only(model)
    if targets == ALL_LINEAR or ALL_LINEAR in targets:
        selected = {
            name: weight
            for name, weight in weights.items()
            if not any("head" in name.split(".") for name in weight.names)
            and not all(name.startswith(training_prefixes) for name in weight.names)
        }
        if not selected:
            raise AdapterError(
                "lora: targets='all-linear' selects no layer; the model has no linear layer but its head"
            )
        return selected
    chosen, without_effect = set(), {}
    for target in targets:
        found = {name for name in names if ends_in(name, target)}
        if not found:
            raise AdapterError(no_match_message(model, target, names))
        if all(name.startswith(training_prefixes) for name in found):
            without_effect[target] = min(found)
        chosen |= found
    if len(without_effect) == len(targets):
        choices = sorted({last_component(name) for name in names if not name.startswith(training_prefixes)})
        raise AdapterError(
            f"lora: targets {', '.join(targets)} match layers that run only in training ({min(chosen)}), "
            f"so adapters there would not change the model's output; choose among {', '.join(choices)}"
        )
    for target, name in without_effect.items():
        warnings.warn(
            f"lora: the target {target!r} matches layers that run only in training ({name}); adapters there do "
            "not change the model's output",
            stacklevel=3,
        )
    selected = {name: weight for name, weight in weights.items() if not chosen.isdisjoint(weight.names)}
    for weight in selected.values():
        check_all_names(weight, chosen)
    return selected


def check_all_names(weight: AdaptableWeight, chosen: set[str]) -> None:
    if others := [name for name in weight.names if name not in chosen]:
        name = next(name for name in weight.names if name in chosen)
        endings = {last_component(name) for name in weight.names}
        remedy = f"target {endings.pop()!r}, or list all of these names" if len(endings) == 1 else "list all of them"
        raise AdapterError(
            f"lora: {name} shares its weight with {', '.join(others)}, which the targets leave out; an adapter acts on "
            f"all layers that share the weight: {remedy}"
        )


def no_match_message(model: nn.Module, target: str, names: Iterable[str]) -> str:
    layers = {last_component(name) for name in names}
    for name, _ in model.named_modules():
        if ends_in(name, target):
            choices = ", ".join(sorted(layers))
            return f"lora: no linear layer is named {target!r} ({name} is not a linear layer); choose among {choices}"
    hint = suggest_name(target, layers) if layers else "the model has no linear layer at all"
    return f"lora: no linear layer is named {target!r}; {hint} (targets = {ALL_LINEAR!r} adapts all of them)"


def training_only(model: nn.Module) -> tuple[str, ...]:
    """Prefixes of the layers that a forward without a loss does not run: modules list them in `training_only`."""
    return tuple(
        f"{path}.{child}" if path else child
        for path, module in model.named_modules()
        for child in getattr(module, "training_only", ())
    )


def ends_in(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def last_component(name: str) -> str:
    return name.rpartition(".")[2]
