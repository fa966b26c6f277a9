"""Scaling laws: how the loss falls with size and data, fitted, and what to train for a given compute.

    L(N, D) = E + A / N^α + B / D^β          C = 6·N·D FLOPs (2 forward, 4 backward, a weight and token)
    best for C:   N = G·(C/6)^{β/(α+β)},   D = C / 6N,   G = (αA / βB)^{1/(α+β)}

Kaplan et al. 2020; Hoffmann et al. 2022, whose published constants Besiroglu et al. 2024 found to misfit their own data
and fitted anew. Given the two exponents the law is linear in E, A and B: the fit solves for these and searches those.
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
        """Tokens that bring a model of this size to this loss."""
        left = loss - self.floor - self.size / parameters**self.size_exponent
        if left <= 0:
            raise ValueError(f"{parameters:.3g} parameters never reach a loss of {loss}; more are needed")
        return (self.data / left) ** (1 / self.data_exponent)


HOFFMANN = ScalingLaw(1.69, 406.4, 0.34, 410.7, 0.28)
BESIROGLU = ScalingLaw(1.8172, 482.01, 0.3478, 2085.43, 0.3658)


def training_flops(parameters: float, tokens: float) -> float:
    return 6 * parameters * tokens


def lifetime_flops(law: ScalingLaw, loss: float, parameters: float, served: float) -> float:
    """Training a model of this size to this loss, then serving so many tokens, 2 FLOPs a weight each."""
    return training_flops(parameters, law.tokens_for(loss, parameters)) + 2 * parameters * served


def training_plan(parameters: int, tokens: float) -> dict[str, dict[str, float]]:
    """Groups for a plan: this many tokens of training, and what the same compute would be best spent on."""
    compute = training_flops(parameters, tokens)
    best_parameters, best_tokens = BESIROGLU.optimum(compute)
    return {
        "training_run_flops": {"total": compute},
        "training_run": {
            "tokens": tokens,
            "tokens_per_weight": tokens / parameters,
            "best_parameters_for_it": best_parameters,
            "best_tokens_for_it": best_tokens,
        },
    }


def fit(parameters: Sequence[float], tokens: Sequence[float], losses: Sequence[float]) -> ScalingLaw:
    """The law of least relative squared error. Needs runs in which size and data vary apart from each other."""
    if not len(parameters) == len(tokens) == len(losses) >= 5:
        raise ValueError(f"the law has five constants; {len(losses)} runs cannot tell them, give at least five")
    n, d, loss = (torch.tensor(values, dtype=torch.float64) for values in (parameters, tokens, losses))  # (R,)
    center, reach = torch.tensor([0.75, 0.75], dtype=torch.float64), 0.75
    for _ in range(12):  # a grid of exponents around the best so far, ever finer
        steps = torch.linspace(-reach, reach, 33, dtype=torch.float64)
        exponents = (center + torch.cartesian_prod(steps, steps)).clamp_min(0.005)  # (G, 2)
        errors, constants = solve(exponents, n, d, loss)
        best = int(errors.argmin())
        center, reach = exponents[best], reach / 2
    floor, size, data = constants[best].tolist()
    return ScalingLaw(floor, size, center[0].item(), data, center[1].item())


def solve(exponents: Tensor, n: Tensor, d: Tensor, loss: Tensor) -> tuple[Tensor, Tensor]:
    """Of every pair of exponents (G, 2) the squared error (G,) and the constants E, A, B (G, 3) that make it least."""
    a, b = exponents.unsqueeze(-1).unbind(1)  # (G, 1)
    terms = torch.stack([(n / n).expand(len(a), -1), n**-a, d**-b], -1) / loss.unsqueeze(-1)  # (G, R, 3)
    scale = terms.norm(dim=1, keepdim=True)  # columns of one length: powers of 10⁹ are tiny
    ones = terms.new_ones(len(a), len(n), 1)
    constants = torch.linalg.lstsq(terms / scale, ones).solution  # (G, 3, 1)
    errors = (terms / scale @ constants - ones).square().sum((1, 2))
    impossible = (constants < 0).any(1).squeeze(-1)  # a loss falls with size and data, to no less than nothing
    return errors.masked_fill(impossible, torch.inf), (constants.squeeze(-1) / scale.squeeze(1))
