"""Optimizers: specs that build a torch optimizer of a model's parameters, and its state by parameter name.

The groups of parameters, with their weight decay and share of the learning rate, are those of parameter_groups.py.
State is saved by parameter name, so it does not depend on the order of the parameters; quantized states are saved as
the plain tensors that they consist of.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from regard.checkpoint.atomic_folder import CheckpointError
from regard.compat import cannot_compile
from regard.spec import Spec, SpecError, require
from regard.training.parameter_groups import make_groups

Scales = Mapping[str, float]


@dataclass(frozen=True)
class Optimizer(Spec):
    kind_table: ClassVar[str] = "optimizers"

    def build(self, model: nn.Module, lr: float, scales: Scales | None = None) -> torch.optim.Optimizer:
        """The optimizer of the model's trainable parameters, which it knows by their names.

        scales: factors of the learning rate by parameter name; 1 by default.
        """
        raise NotImplementedError

    def require_range(self, *names: str) -> None:
        """Raise SpecError if one of these fields is not in [0, 1)."""
        for name in names:
            value = getattr(self, name)
            require(0 <= value < 1, f"{self.kind}: {name}={value} must be in [0, 1)")

    def require_nonnegative(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            require(value >= 0, f"{self.kind}: {name}={value} must not be negative")


@dataclass(frozen=True)
class AdamW(Optimizer):
    """Adam with decoupled weight decay. Loshchilov & Hutter 2019.

    m = β₁ m + (1 - β₁) g          v = β₂ v + (1 - β₂) g²
    θ = θ - η (m̂ / (√v̂ + ε) + λ θ)          m̂, v̂: bias-corrected
    """

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1

    def check(self) -> None:
        self.require_range("beta1", "beta2")
        self.require_nonnegative("weight_decay")
        require(self.eps > 0, f"{self.kind}: eps={self.eps} must be positive")

    def build(self, model: nn.Module, lr: float, scales: Scales | None = None) -> torch.optim.Optimizer:
        groups = make_groups(model, lr, self.weight_decay, scales)
        # The fused implementation makes one pass over the weights instead of several, on CPUs too.
        return torch.optim.AdamW(groups, lr=lr, betas=(self.beta1, self.beta2), eps=self.eps, fused=True)


@dataclass(frozen=True)
class AdamW8bit(AdamW):
    """AdamW with moments of 8 bits, quantized in blocks of 256 values. Dettmers et al. 2022.

    It needs torchao. The moments of parameters with fewer than 4096 values stay float32.
    """

    def build(self, model: nn.Module, lr: float, scales: Scales | None = None) -> torch.optim.Optimizer:
        try:
            from torchao.optim import AdamW8bit as QuantizedAdamW
        except ImportError as error:
            raise SpecError("adamw8bit needs torchao; install it with: pip install 'regard[optimizers]'") from error
        groups = make_groups(model, lr, self.weight_decay, scales)
        reason = cannot_compile(groups[0]["params"][0][1].device)
        require(reason is None, f"adamw8bit compiles its update, and {reason}; use adamw")
        return QuantizedAdamW(groups, lr=lr, betas=(self.beta1, self.beta2), eps=self.eps)


@dataclass(frozen=True)
class SGD(Optimizer):
    """Gradient descent with momentum; weight decay is added to the gradient. Polyak 1964, Sutskever et al. 2013.

    b = μ b + g + λ θ          θ = θ - η b          nesterov: θ = θ - η (g + λ θ + μ b)
    """

    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0

    def check(self) -> None:
        self.require_range("momentum")
        self.require_nonnegative("weight_decay")
        require(self.momentum > 0 or not self.nesterov, "sgd: nesterov needs a momentum; set momentum=0.9")

    def build(self, model: nn.Module, lr: float, scales: Scales | None = None) -> torch.optim.Optimizer:
        groups = make_groups(model, lr, self.weight_decay, scales)
        return torch.optim.SGD(groups, lr=lr, momentum=self.momentum, nesterov=self.nesterov)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group to its share of `lr`."""
    for group in optimizer.param_groups:
        set_group_rate(group, lr * group.get("lr_scale", 1.0))


def set_group_rate(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], Tensor):  # a compiled optimizer would recompile for every new float
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state, as `parameter/quantity` -> tensor."""
    state = optimizer.state_dict()
    names = [name for group in state["param_groups"] for name in group["param_names"]]
    return {
        f"{names[index]}/{key}": plain
        for index, quantities in state["state"].items()
        for quantity, tensor in quantities.items()
        for key, plain in plain_tensors(quantity, tensor)
    }


def plain_tensors(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensor by its name, or the plain tensors of a tensor subclass, as `name.attribute`."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None and not hasattr(tensor, "full_tensor"):  # a DTensor stays one
        for attribute in flatten()[0]:
            yield from plain_tensors(f"{name}.{attribute}", getattr(tensor, attribute))
    else:
        yield name, tensor


def load_optimizer_state(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    groups = optimizer.state_dict()["param_groups"]
    index = {name: i for group in groups for name, i in zip(group["param_names"], group["params"], strict=True)}
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, quantity = key.rsplit("/", 1)
        if name not in index:
            raise CheckpointError(
                f"the saved optimizer has a state for {name!r}, which this model does not train; use the run's config"
            )
        state.setdefault(index[name], {})[quantity] = tensor
    if any("." in quantity for quantities in state.values() for quantity in quantities):
        return copy_state(optimizer, tensors)
    optimizer.load_state_dict({"state": state, "param_groups": groups})


@torch.no_grad()
def copy_state(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Copy saved tensors into the state of an optimizer that creates tensors of its own class."""
    initialize_state(optimizer)
    state = optimizer_state(optimizer)
    if state.keys() != tensors.keys():
        differing = sorted(state.keys() ^ tensors.keys())
        raise CheckpointError(f"the saved optimizer has another state than this one: {differing[0]}; use its config")
    for name, tensor in state.items():
        tensor.copy_(tensors[name])


def initialize_state(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer create its state, by a step with zero gradients and rates, which changes no parameter."""
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    set_learning_rate(optimizer, 0.0)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        set_group_rate(group, rate)
