"""Muon: orthogonalized momentum for the matrices of hidden layers, AdamW for all other parameters. Jordan et al. 2024.

    b = μ b + (1 - μ) g          u = μ b + (1 - μ) g          (nesterov; else u = b)
    o = U Vᵀ of u = U Σ Vᵀ, approximately          θ = θ - η (s o + λ θ)

Newton-Schulz iterations x ← a x + (b x xᵀ + c (x xᵀ)²) x of u / ‖u‖ bring all singular values near 1 with matrix
products only. They run in bfloat16 on a GPU, and in the dtype of the weights on a CPU. The factor s depends on the
shape (out, in):

    match_rms_adamw   s = 0.2 √max(out, in): updates as large as AdamW's, so both use one rate   Liu et al. 2025
    original          s = √max(1, out / in): the rate is that of Muon, e.g. 0.02; set adamw_scale    Jordan et al. 2024

Stacked matrices (…, out, in), such as those of experts, are orthogonalized one by one. Momentum that is sharded over
processes is gathered, and every process computes the whole update, of which it applies its shard.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from regard.spec import require
from regard.training.optimizer import Optimizer, Scales
from regard.training.parallel.sharded_files import shard_like, whole_tensor
from regard.training.parameter_groups import hidden_matrices, make_groups

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # the steepest at 0; singular values end in about [0.7, 1.2]
SMALLEST_NORM = 1e-7


@dataclass(frozen=True)
class Muon(Optimizer):
    momentum: float = 0.95
    nesterov: bool = True
    iterations: int = 5  # of Newton-Schulz
    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    weight_decay: float = 0.1
    adamw_scale: float = 1.0  # factor of the learning rate for the parameters that AdamW updates
    beta1: float = 0.9  # of AdamW, as the two that follow
    beta2: float = 0.95
    eps: float = 1e-8

    def check(self) -> None:
        self.require_range("momentum", "beta1", "beta2")
        self.require_nonnegative("weight_decay")
        for name in ("eps", "adamw_scale", "iterations"):
            require(getattr(self, name) > 0, f"muon: {name}={getattr(self, name)} must be positive")

    def build(self, model: nn.Module, lr: float, scales: Scales | None = None) -> torch.optim.Optimizer:
        matrices = hidden_matrices(model)
        groups = []
        for group in make_groups(model, lr, self.weight_decay, scales):
            groups.append(group | {"params": [pair for pair in group["params"] if pair[1] in matrices], "muon": True})
            rate = {"lr": group["lr"] * self.adamw_scale, "lr_scale": group["lr_scale"] * self.adamw_scale}
            others = [pair for pair in group["params"] if pair[1] not in matrices]
            groups.append(group | {"params": others, "muon": False} | rate)
        return MuonWithAdamW([group for group in groups if group["params"]], lr, self)


class MuonWithAdamW(torch.optim.Optimizer):
    """One optimizer, in which the option `muon` of a group selects the update."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, spec: Muon):
        options = {name: getattr(spec, name) for name in ("momentum", "nesterov", "iterations", "adjust_lr", "eps")}
        # fused: torch's load_state_dict then keeps the step count on the device of the parameter, in float32
        super().__init__(groups, options | {"lr": lr, "betas": (spec.beta1, spec.beta2), "muon": True, "fused": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is None, "the gradients are computed by the caller"
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if group["muon"]:
                for parameter in parameters:
                    self.update_matrix(parameter, group)
            elif parameters:
                self.update_adamw(parameters, group)

    def update_matrix(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
        orthogonal = orthogonalize(whole_tensor(update), group["iterations"])
        update = shard_like(orthogonal, parameter) if hasattr(parameter, "device_mesh") else orthogonal
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"] * shape_factor(parameter.shape, group["adjust_lr"]))

    def update_adamw(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter] = {
                    "step": torch.zeros((), device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        states = [self.state[parameter] for parameter in parameters]
        adamw(
            parameters, [p.grad for p in parameters if p.grad is not None],
            [state["exp_avg"] for state in states], [state["exp_avg_sq"] for state in states], [],
            [state["step"] for state in states], fused=True, amsgrad=False, beta1=group["betas"][0],
            beta2=group["betas"][1], lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
            maximize=False,
        )  # fmt: skip


def orthogonalize(matrix: Tensor, iterations: int) -> Tensor:
    """The matrices (…, out, in) with all singular values near 1."""
    a, b, c = COEFFICIENTS
    x = matrix.bfloat16() if matrix.device.type == "cuda" else matrix
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp_min(SMALLEST_NORM)
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    for _ in range(iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x if wide else x.mT).to(matrix.dtype)


def shape_factor(shape: torch.Size, adjust_lr: str) -> float:
    rows, columns = shape[-2:]
    return 0.2 * max(rows, columns) ** 0.5 if adjust_lr == "match_rms_adamw" else max(1.0, rows / columns) ** 0.5
