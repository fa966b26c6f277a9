"""Code that Mamba, Mamba-2 and RG-LRU share: initial decay rates and steps, convolution weights, and chunked forwards.

    A_n = -n                              initial decay rates, as in S4D's real form        Gu et al. 2022
    Δ log-uniform in [0.001, 0.1]         an untrained state decays over 10 to 1000 tokens

Initial values are computed on the CPU and copied. On the meta device one value stands for all: a config may claim any
size, and a checkpoint, which builds the model there during training, must not draw random numbers.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from regard.layout import TokenLayout

MIN_STEP, MAX_STEP = 1e-3, 1e-1
CHUNK = 1024  # tokens


def log_rates(count: int, *channels: int) -> nn.Parameter:
    """(…, count) log -A: the logarithms of 1 … count."""
    last = 1 if on_meta() else count
    return filled(torch.arange(1, last + 1, dtype=torch.float32, device="cpu").log(), *channels, count)


def step_bias(count: int) -> nn.Parameter:
    """(count,) such that softplus(bias) = Δ, drawn log-uniformly; the inverse of softplus is log(exp Δ - 1)."""
    steps = uniform(count, math.log(MIN_STEP), math.log(MAX_STEP)).exp()
    return filled(steps.expm1().log(), count)


def uniform(count: int, low: float, high: float) -> Tensor:
    """(count,) draws on the CPU; on the meta device (1,) without a draw."""
    return torch.full((1,), low, device="cpu") if on_meta() else torch.empty(count, device="cpu").uniform_(low, high)


def on_meta() -> bool:
    """Whether modules are now built on the meta device."""
    return torch.empty(0).device.type == "meta"


def filled(values: Tensor, *shape: int) -> nn.Parameter:
    """A parameter of this shape with these values, broadcast, on the current default device."""
    parameter = nn.Parameter(torch.empty(shape))
    with torch.no_grad():
        parameter.copy_(values)
    return parameter


class ConvWeights(nn.Module):
    """The weights of a short convolution (kernels/convolution.py): (k, channels), the newest token's tap first."""

    weight_decay = no_muon = ("weight",)

    def __init__(self, taps: int, channels: int, bias: bool):
        super().__init__()
        bound = taps**-0.5
        self.weight = nn.Parameter(torch.empty(taps, channels).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None


def chunked_forward(
    layer: Callable[..., tuple[Tensor, ...]],
    x: Tensor,
    layout: TokenLayout,
    carried: Sequence[Tensor],
    whole: bool = False,
) -> tuple[Tensor, ...]:
    """layer(x, layout, *carried) -> (y, *carried) in chunks of x (B, L, D), with the same result as in one pass.

    On a CPU the activations of a thousand tokens fit in the cache, those of sixteen thousand do not: chunks keep time
    linear in the length and memory almost constant. A GPU runs all tokens at once, and so do packed rows, and with
    `whole` all rows: a hook then reads all tokens.
    """
    if whole or x.device.type != "cpu" or x.shape[1] <= CHUNK or layout.segments is not None:
        return layer(x, layout, *carried)
    ys = []
    for start in range(0, x.shape[1], CHUNK):
        y, *carried = layer(x[:, start : start + CHUNK], layout.tokens(slice(start, start + CHUNK)), *carried)
        ys.append(y)
    return torch.cat(ys, 1), *carried
