"""AdamW: Adam with decoupled weight decay. Loshchilov & Hutter 2019.

    m = β₁ m + (1 - β₁) g          v = β₂ v + (1 - β₂) g²
    θ = θ - η (m̂ / (√v̂ + ε) + λ θ)          m̂, v̂: bias-corrected

Weight decay applies to matrices only. Norms and biases are not decayed, nor are embeddings (and a tied head): small
embeddings make the gradients of the early layers large (OLMo 2, 2025). A module excludes other parameters by the
attribute `no_weight_decay`, a tuple of their names: the decay rates of a state space, for example, are a matrix, but
not a weight of a linear map. State is saved by parameter name, so it does not depend on the order of the parameters.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from regard.checkpoint.atomic_folder import CheckpointError
from regard.spec import Spec, require


@dataclass(frozen=True)
class Optimizer(Spec):
    kind_table: ClassVar[str] = "optimizers"

    def build(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        """The optimizer of the model's trainable parameters, which it knows by their names."""
        raise NotImplementedError


@dataclass(frozen=True)
class AdamW(Optimizer):
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1

    def check(self) -> None:
        for name in ("beta1", "beta2"):
            require(0 <= getattr(self, name) < 1, f"adamw: {name}={getattr(self, name)} must be in [0, 1)")
        require(self.eps > 0, f"adamw: eps={self.eps} must be positive")
        require(self.weight_decay >= 0, f"adamw: weight_decay={self.weight_decay} must not be negative")

    def build(self, model: nn.Module, lr: float) -> torch.optim.AdamW:
        decayed, not_decayed = decay_groups(model)
        groups = [
            {"params": decayed, "weight_decay": self.weight_decay},
            {"params": not_decayed, "weight_decay": 0.0},
        ]
        # The fused implementation makes one pass over the weights instead of several, on CPUs too.
        return torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=lr,
            betas=(self.beta1, self.beta2),
            eps=self.eps,
            fused=True,
        )


def decay_groups(model: nn.Module) -> tuple[list[tuple[str, nn.Parameter]], list[tuple[str, nn.Parameter]]]:
    """The named trainable parameters with weight decay, and those without."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    require(len(named) > 0, "the model has no trainable parameter; set requires_grad of some to True")
    excluded = {parameter for module in model.modules() for parameter in excluded_parameters(module)}
    decayed = {name for name, p in named if p.ndim >= 2 and p not in excluded}
    return [pair for pair in named if pair[0] in decayed], [pair for pair in named if pair[0] not in decayed]


def excluded_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The direct parameters of a module that have no weight decay even if they are matrices."""
    names = {"bias", *getattr(module, "no_weight_decay", ())}
    parameters = dict(module.named_parameters(recurse=False))
    if unknown := set(getattr(module, "no_weight_decay", ())) - parameters.keys():
        raise AttributeError(
            f"{type(module).__name__}.no_weight_decay names {', '.join(sorted(unknown))}; its parameters are "
            f"{', '.join(parameters) or 'none'}"
        )
    return [p for name, p in parameters.items() if name in names or isinstance(module, nn.Embedding)]


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state, as `parameter/quantity` -> tensor."""
    state = optimizer.state_dict()
    names = [name for group in state["param_groups"] for name in group["param_names"]]
    return {
        f"{names[index]}/{quantity}": tensor
        for index, quantities in state["state"].items()
        for quantity, tensor in quantities.items()
    }


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
    optimizer.load_state_dict({"state": state, "param_groups": groups})
