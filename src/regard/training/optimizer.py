"""AdamW: Adam with weight decay apart from the gradient. Loshchilov & Hutter 2019.

    m = β₁ m + (1 - β₁) g          v = β₂ v + (1 - β₂) g²
    θ = θ - η (m̂ / (√v̂ + ε) + λ θ)          m̂, v̂ corrected for their start at zero

Decay pulls only matrices that multiply: norms and biases have no direction to shrink along, the rates of a state space
would be pulled to another speed, and embeddings (a tied head with them) are left alone because small embeddings make
the early layers' gradients large (OLMo 2, 2025).
State is kept by parameter name, so that it does not depend on the order in which a model lists its weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.checkpoint.folder import CheckpointError
from regard.spec import Spec, require

NO_MATRIX = ("bias", "A_log", "log_step", "log_decay", "turn")  # ends of names, whatever their shape


@dataclass(frozen=True)
class AdamW(Spec):
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
        decayed, plain = decay_groups(model)
        groups = [
            {"params": decayed, "weight_decay": self.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        # Fused, on CPUs too: one pass over the weights instead of several.
        return torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=lr,
            betas=(self.beta1, self.beta2),
            eps=self.eps,
            fused=True,
        )


def decay_groups(model: nn.Module) -> tuple[list[tuple[str, nn.Parameter]], list[tuple[str, nn.Parameter]]]:
    """The named parameters to train: those with weight decay, and those without."""
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    require(len(named) > 0, "the model has no parameter to train; set requires_grad on some")
    matrices = {name for name, p in named if p.ndim >= 2 and p not in embeddings and not name.endswith(NO_MATRIX)}
    return [pair for pair in named if pair[0] in matrices], [pair for pair in named if pair[0] not in matrices]


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What the optimizer remembers, as `parameter/quantity` -> tensor."""
    whole = optimizer.state_dict()
    names = [name for group in whole["param_groups"] for name in group["param_names"]]
    return {
        f"{names[index]}/{quantity}": tensor
        for index, quantities in whole["state"].items()
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
                f"the saved optimizer knows {name!r}, which this model does not train; use its own config"
            )
        state.setdefault(index[name], {})[quantity] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": groups})
