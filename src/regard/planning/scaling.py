"""Scaling laws: the loss as a function of size and data, its fit, and the optimal size for a compute budget.

    L(N, D) = E + A / N^α + B / D^β          C = 6·N·D FLOPs (2 forward and 4 backward per parameter and token)
    optimum for C:   N = G·(C/6)^{β/(α+β)},   D = C / 6N,   G = (αA / βB)^{1/(α+β)}

Kaplan et al. 2020; Hoffmann et al. 2022, whose published constants do not fit their own data; Besiroglu et al. 2024
fitted them again. For given exponents the law is linear in E, A and B: the fit searches a grid of exponents and solves
for these three.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ScalingLaw:
    floor: float  # E: the loss that neither size nor data removes
    size: float  # A
    size_exponent: float  # α
    data: float  # B
    data_exponent: float  # β

    def loss(self, parameters: float, tokens: float) -> float:
        return self.floor + self.size / parameters**self.size_exponent + self.data / tokens**self.data_exponent

    def optimum(self, compute: float) -> tuple[float, float]:
        """(parameters, tokens) of the lowest loss for this many FLOPs of training."""
        a, b = self.size_exponent, self.data_exponent
        balance = (a * self.size / (b * self.data)) ** (1 / (a + b))
        parameters = balance * (compute / 6) ** (b / (a + b))
        return parameters, compute / (6 * parameters)

    def tokens_for(self, loss: float, parameters: float) -> float:
        """The number of training tokens with which a model of this size reaches this loss."""
        data_term = loss - self.floor - self.size / parameters**self.size_exponent
        if data_term <= 0:
            raise ValueError(f"{parameters:.3g} parameters never reach a loss of {loss}; choose a larger model")
        return (self.data / data_term) ** (1 / self.data_exponent)


HOFFMANN = ScalingLaw(1.69, 406.4, 0.34, 410.7, 0.28)
BESIROGLU = ScalingLaw(1.8172, 482.01, 0.3478, 2085.43, 0.3658)


def flops_6nd(parameters: float, tokens: float) -> float:
    """The laws' estimate of training compute. `Plan.training_flops` counts it from the modules instead."""
    return 6 * parameters * tokens


def lifetime_flops(law: ScalingLaw, loss: float, parameters: float, served: float) -> float:
    """FLOPs of training a model of this size to this loss and of serving `served` tokens at 2 per parameter."""
    return flops_6nd(parameters, law.tokens_for(loss, parameters)) + 2 * parameters * served


def fit(parameters: Sequence[float], tokens: Sequence[float], losses: Sequence[float]) -> ScalingLaw:
    """The law of least relative squared error. Size and data must vary independently across the runs."""
    if not len(parameters) == len(tokens) == len(losses) >= 5:
        counts = ", ".join(map(str, map(len, (parameters, tokens, losses))))
        raise ValueError(
            f"five constants cannot be fitted to {counts} values; give at least five of each, equally many"
        )
    n, d, loss = (torch.tensor(values, dtype=torch.float64) for values in (parameters, tokens, losses))  # (R,)
    center, radius = torch.tensor([0.75, 0.75], dtype=torch.float64), 0.75
    for _ in range(12):  # a grid of exponents around the best so far, half as wide each time
        steps = torch.linspace(-radius, radius, 33, dtype=torch.float64)
        exponents = (center + torch.cartesian_prod(steps, steps)).clamp_min(0.005)  # (G, 2)
        errors, constants = solve(exponents, n, d, loss)
        best = int(errors.argmin())
        center, radius = exponents[best], radius / 2
    floor, size, data = constants[best].tolist()
    return ScalingLaw(floor, size, center[0].item(), data, center[1].item())


def solve(exponents: Tensor, n: Tensor, d: Tensor, loss: Tensor) -> tuple[Tensor, Tensor]:
    """For every pair of exponents (G, 2): the least squared error (G,) and its constants E, A, B (G, 3)."""
    a, b = exponents.unsqueeze(-1).unbind(1)  # (G, 1)
    terms = torch.stack([(n / n).expand(len(a), -1), n**-a, d**-b], -1) / loss.unsqueeze(-1)  # (G, R, 3)
    scale = terms.norm(dim=1, keepdim=True)  # columns of equal norm: powers of 10⁹ are tiny
    ones = terms.new_ones(len(a), len(n), 1)
    constants = torch.linalg.lstsq(terms / scale, ones).solution  # (G, 3, 1)
    errors = (terms / scale @ constants - ones).square().sum((1, 2))
    negative = (constants < 0).any(1).squeeze(-1)  # the loss would rise with size or data, or fall below zero
    return errors.masked_fill(negative, torch.inf), (constants.squeeze(-1) / scale.squeeze(1))
