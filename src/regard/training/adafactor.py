"""Adafactor: Adam's second moment, factored into one value per row and per column. Shazeer & Stern 2018.

    r = β r + (1 - β) mean_columns(g² + ε)          c = β c + (1 - β) mean_rows(g² + ε)          β = 1 - t^-0.8
    u = g / √(r cᵀ / mean(r))          u = u / max(1, rms(u) / d)          θ = θ - η (u + λ θ)

For a matrix of n rows and m columns the state has n + m values instead of n·m. Vectors keep all values of the second
moment. With `scale_parameter` the rate is multiplied by max(10⁻³, rms(θ)), with `relative_step` it is at most 1/√t; the
paper uses both with η = 10⁻².
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.spec import require
from regard.training.optimizer import Optimizer, Scales
from regard.training.parameter_groups import make_groups

SMALLEST_RMS = 1e-3  # of a parameter, for scale_parameter


@dataclass(frozen=True)
class Adafactor(Optimizer):
    momentum: float = 0.0  # of the updates; 0: none, which saves its memory
    beta2_decay: float = 0.8  # β = 1 - t^-beta2_decay
    square_eps: float = 1e-30  # ε, added to the squared gradient
    clip: float = 1.0  # d: the largest root mean square of an update
    weight_decay: float = 0.1
    scale_parameter: bool = False
    relative_step: bool = False

    def check(self) -> None:
        self.require_range("momentum")
        self.require_nonnegative("weight_decay")
        for name in ("beta2_decay", "square_eps", "clip"):
            require(getattr(self, name) > 0, f"adafactor: {name}={getattr(self, name)} must be positive")

    def build(self, model: nn.Module, lr: float, scales: Scales | None = None) -> torch.optim.Optimizer:
        return FactoredAdam(make_groups(model, lr, self.weight_decay, scales), lr, self)


class FactoredAdam(torch.optim.Optimizer):
    def __init__(self, groups: list[dict[str, Any]], lr: float, spec: Adafactor):
        super().__init__(groups, {"lr": lr})
        self.spec = spec

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is None, "the gradients are computed by the caller"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, group["lr"], group["weight_decay"])

    def update(self, parameter: Tensor, gradient: Tensor, lr: float, weight_decay: float) -> None:
        spec, state = self.spec, self.state[parameter]
        if not state:
            state |= initial_state(gradient, spec.momentum > 0)
        state["step"] += 1
        step = float(state["step"])
        update = self.normalized(gradient, state, step)
        update.div_((rms(update) / spec.clip).clamp_min(1.0))
        rate = min(lr, step**-0.5) if spec.relative_step else lr
        scale = rms(parameter).clamp_min(SMALLEST_RMS) if spec.scale_parameter else 1.0
        update = update * (rate * scale)
        if spec.momentum:
            update = state["exp_avg"].lerp_(update, 1 - spec.momentum)
        parameter.mul_(1 - weight_decay * rate * scale).sub_(update)

    def normalized(self, gradient: Tensor, state: dict[str, Tensor], step: float) -> Tensor:
        """The gradient divided by the root of the second moment, which is updated."""
        weight = step**-self.spec.beta2_decay  # 1 - β
        squared = gradient.square() + self.spec.square_eps
        if gradient.ndim < 2:
            return gradient * state["exp_avg_sq"].lerp_(squared, weight).rsqrt()
        row = state["exp_avg_sq_row"].lerp_(squared.mean(-1), weight)  # (…, n)
        column = state["exp_avg_sq_col"].lerp_(squared.mean(-2), weight)  # (…, m)
        row = (row / row.mean(-1, keepdim=True)).rsqrt().unsqueeze(-1)
        return gradient * row * column.rsqrt().unsqueeze(-2)


def initial_state(gradient: Tensor, momentum: bool) -> dict[str, Tensor]:
    state = {"step": torch.zeros((), device="cpu")}
    if gradient.ndim < 2:
        state["exp_avg_sq"] = torch.zeros_like(gradient)
    else:
        state["exp_avg_sq_row"] = gradient.new_zeros(gradient.shape[:-1])
        state["exp_avg_sq_col"] = gradient.new_zeros((*gradient.shape[:-2], gradient.shape[-1]))
    return state | {"exp_avg": torch.zeros_like(gradient)} if momentum else state


def rms(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor) / tensor.numel() ** 0.5
