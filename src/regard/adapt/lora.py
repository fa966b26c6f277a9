"""LoRA: a linear layer is adapted by a low-rank product of two matrices, and only these are trained.

    y = W x + (α / r) B A x          A (r, in) random, B (out, r) zero, so training starts from W

Hu et al. 2021. Merging computes W + (α / r) B A once; the merged model is as fast as the original.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.adapt.replace_modules import replace_modules
from regard.spec import Spec, nearest, require


class AdapterError(ValueError):
    """An adapter that does not fit the model."""


@dataclass(frozen=True)
class LoRA(Spec):
    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ("q_proj", "v_proj")  # names of linear layers, or their last parts between dots
    dropout: float = 0.0

    def check(self) -> None:
        require(self.rank > 0, f"lora: rank={self.rank} must be positive")
        require(self.alpha > 0, f"lora: alpha={self.alpha} must be positive")
        require(len(self.targets) > 0, "lora: targets is empty; name some linear layers, such as 'q_proj'")
        require(0 <= self.dropout < 1, f"lora: dropout={self.dropout} must be in [0, 1)")


class LoRALinear(nn.Module):
    """A linear layer `base` and its adapter."""

    def __init__(self, base: nn.Linear, lora: LoRA):
        super().__init__()
        self.base, self.lora = base, lora
        place = {"device": base.weight.device, "dtype": base.weight.dtype}
        self.lora_A = nn.Linear(base.in_features, lora.rank, bias=False, **place)
        self.lora_B = nn.Linear(lora.rank, base.out_features, bias=False, **place)
        self.scale = lora.alpha / lora.rank
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        dropped = F.dropout(x, self.lora.dropout, self.training)
        return self.base(x) + self.scale * self.lora_B(self.lora_A(dropped))

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """One linear layer with the same output."""
        base = self.base.weight
        wide = torch.promote_types(base.dtype, torch.float32)  # half precision would round the small addend away
        change = self.scale * (self.lora_B.weight.to(wide) @ self.lora_A.weight.to(wide))  # (out, in)
        linear = nn.Linear(self.base.in_features, self.base.out_features, device="meta")
        linear.weight = nn.Parameter((base.to(wide) + change).to(base.dtype), requires_grad=base.requires_grad)
        linear.bias = self.base.bias
        return linear


def add_lora(model: nn.Module, lora: LoRA, seed: int | None = None) -> list[str]:
    """Add adapters to the targets and freeze all other parameters; returns the names of the adapted layers."""
    chosen = targeted(model, lora.targets)
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        return replace_modules(model, lambda name, _: name in chosen, lambda name, _: LoRALinear(chosen[name], lora))


def targeted(model: nn.Module, targets: tuple[str, ...]) -> dict[str, nn.Linear]:
    """The linear layers whose names end in a target; AdapterError for a target that matches none, or another module."""
    if adapters(model):
        raise AdapterError("this model already has LoRA adapters; merge them first, or load the model without them")
    modules = dict(model.named_modules())
    ends = {name.rpartition(".")[2] for name in linear_names(modules)}
    chosen = {}
    for target in targets:
        found = {name: module for name, module in modules.items() if ends_in(name, target)}
        if not found:
            hint = nearest(target, ends) if ends else "the model has no linear layer at all"
            raise AdapterError(f"lora: no layer is named {target!r}; {hint}")
        for name, module in found.items():
            if not isinstance(module, nn.Linear):
                raise AdapterError(f"lora: {name} is not a linear layer; choose among {', '.join(sorted(ends))}")
        chosen |= found
    unused = training_only(model)
    used = {name.rpartition(".")[2] for name in linear_names(modules) if not name.startswith(unused)}
    if all(name.startswith(unused) for name in chosen):
        raise AdapterError(
            f"lora: targets {', '.join(targets)} match only layers that run in training alone ({next(iter(chosen))}), "
            f"so adapters there would not change the model's output; choose among {', '.join(sorted(used))}"
        )
    return chosen


def linear_names(modules: dict[str, nn.Module]) -> list[str]:
    return [name for name, module in modules.items() if isinstance(module, nn.Linear)]


def training_only(model: nn.Module) -> tuple[str, ...]:
    """Prefixes of the layers that a forward without a loss does not run: modules list them in `training_only`."""
    return tuple(
        f"{path}.{child}" if path else child
        for path, module in model.named_modules()
        for child in getattr(module, "training_only", ())
    )


def ends_in(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def adapters(model: nn.Module) -> dict[str, LoRALinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}


def merge_lora(model: nn.Module) -> dict[str, LoRALinear]:
    """Replace adapted layers by merged linear layers; returns the adapted ones, for `unmerge_lora`."""
    found = adapters(model)
    if not found:
        raise AdapterError("this model has no LoRA adapters to merge; add or load some first")
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    for name, module in found.items():
        if len(tied := owners[id(module.base.weight)]) > 1:
            raise AdapterError(
                f"{name} cannot be merged: its weight is tied ({' = '.join(tied)}) and the adapter is not; "
                "build the model with tied=False, or leave this layer out of the targets"
            )
    replace_modules(model, lambda name, _: name in found, lambda name, _: found[name].merged())
    return found


def unmerge_lora(model: nn.Module, merged: dict[str, LoRALinear]) -> None:
    """Restore the adapted layers that `merge_lora` returned; their weights were not changed, so this is exact."""
    replace_modules(model, lambda name, _: name in merged, lambda name, _: merged[name])
