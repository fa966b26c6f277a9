"""How a state space's own weights begin: how fast it forgets, and in what steps.

    A_n = -n            rates from slow to fast, as S4D's real form has them        Gu et al. 2022
    Δ log-uniform in [0.001, 0.1]         a unit's memory lasts 10 to 1000 tokens before it learns better

Made on the CPU and copied, so that on the meta device, where plans are made, nothing is computed.
"""

import math

import torch
from torch import Tensor, nn

SHORTEST, LONGEST = 1e-3, 1e-1


def log_rates(count: int, *channels: int) -> nn.Parameter:
    """(…, count) log -A: the logarithms of 1 … count."""
    return filled(torch.arange(1, count + 1, dtype=torch.float32, device="cpu").log(), *channels, count)


def step_bias(count: int) -> nn.Parameter:
    """(count,) such that softplus(bias) = Δ, drawn log-uniformly; the inverse of softplus is log(exp Δ - 1)."""
    steps = torch.empty(count, device="cpu").uniform_(math.log(SHORTEST), math.log(LONGEST)).exp()
    return filled(steps.expm1().log(), count)


def filled(values: Tensor, *shape: int) -> nn.Parameter:
    parameter = nn.Parameter(torch.empty(shape))
    with torch.no_grad():
        parameter.copy_(values)
    return parameter


class ConvWeights(nn.Module):
    """The weights of a short convolution (kernels/convolution.py): (k, channels), the newest token's tap first."""

    def __init__(self, taps: int, channels: int, bias: bool):
        super().__init__()
        bound = taps**-0.5
        self.weight = nn.Parameter(torch.empty(taps, channels).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None
