"""Scaling laws: the loss as a function of size and data, its fit, and the optimal size for a compute budget.

    L(N, D) = E + A / N^α + B / D^β          C = 6·N·D FLOPs (2 forward and 4 backward per parameter and token)
    optimum for C:   N = G·(C/6)^{β/(α+β)},   D = C / 6N,   G = (αA / βB)^{1/(α+β)}

Kaplan et al. 2020; Hoffmann et al. 2022, whose published constants do not fit their own data; Besiroglu et al. 2024
fitted them again. scaling_fit.py fits the law to measured losses, isoflop.py finds the optimum without it.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ScalingRun:
    """A trained model: its non-embedding parameters, its training tokens, its FLOPs, and its loss on held-out data."""

    parameters: float
    tokens: float
    loss: float
    flops: float


@dataclass(frozen=True)
class ScalingLaw:
    floor: float  # E: the loss that neither size nor data removes
    size: float  # A
    size_exponent: float  # α
    data: float  # B
    data_exponent: float  # β

    def loss(self, parameters: float, tokens: float) -> float:
        return self.floor + self.size / parameters**self.size_exponent + self.data / tokens**self.data_exponent

    @property
    def optimum_exponent(self) -> float:
        """a in N ∝ C^a, the optimal size for a compute; that of the tokens is 1 - a."""
        return self.data_exponent / (self.size_exponent + self.data_exponent)

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
