"""Resampling by a windowed sinc, evaluated at the phases of the new samples.

    y[n] = Σ_k x[k] · h(n · rate/new - k),    h(t) = c · sinc(c t) · cos²(π t / 2w),    c = 0.95 · min(1, new/rate)

h removes what is above half of the lower of the two rates, so that it is not folded into the result. Smith,
"Digital Audio Resampling", 2002.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

ZERO_CROSSINGS = 32  # of the sinc on each side
ROLLOFF = 0.95  # a steep filter needs a margin below half of the rate


def resample(samples: Tensor, rate: int, new_rate: int) -> Tensor:
    """(T,) -> (⌈T · new_rate / rate⌉,)"""
    if rate == new_rate:
        return samples
    step, phases = (number // math.gcd(rate, new_rate) for number in (rate, new_rate))
    cutoff = ROLLOFF * min(1.0, new_rate / rate)
    width = math.ceil(ZERO_CROSSINGS / cutoff)
    offsets = torch.arange(-width, width + step, dtype=torch.float64)
    times = torch.arange(phases, dtype=torch.float64)[:, None] * step / phases - offsets  # (phases, taps)
    window = torch.cos(times.clamp(-width, width) * math.pi / (2 * width)).square()
    kernel = cutoff * torch.sinc(cutoff * times) * window
    padded = F.pad(samples.double(), (width, width + step))
    found = F.conv1d(padded[None, None], kernel[:, None], stride=step)[0]  # (phases, frames)
    return found.T.flatten()[: math.ceil(len(samples) * new_rate / rate)].to(samples.dtype)
