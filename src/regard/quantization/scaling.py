"""Scales of inputs that make a weight, or the inputs, easier to round. They are folded into the module before.

AWQ            s = mean|x|^α        α in {0, 1/20, …} with the least error of W' x: inputs with large activations
                                    get finer steps                       Lin et al. 2023 (arXiv:2306.00978)
SmoothQuant    s = max|x|^α / max|W|^(1-α), α = ½: outliers move from the inputs, which are rounded for every
               token, into the weights                                    Xiao et al. 2022 (arXiv:2211.10438)
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from regard.formats.base import NumberFormat
from regard.quantization.folding import Fold
from regard.quantization.statistics import InputStatistics

STEPS = 20
SMOOTHING = 0.5
SMALLEST = 1e-4


def awq_scales(fold: Fold, statistics: InputStatistics, formats: Mapping[nn.Linear, NumberFormat]) -> Tensor:
    """formats: of the layers that will be quantized; the others of the fold are exact with any scales."""
    sizes = fold.reduce(statistics.mean_magnitude)
    best, least = torch.ones_like(sizes), torch.inf
    weights = {sink: sink.weight.detach() for sink in fold.sinks if sink in formats}
    norms = {sink: statistics.output_error(weight) for sink, weight in weights.items()}
    for step in range(STEPS):
        scales = normalized(sizes ** (step / STEPS))
        per_input = fold.expand(scales).to(sizes.dtype)
        error = 0.0
        for sink, weight in weights.items():
            scaled = weight * per_input.to(weight.dtype)
            rounded = formats[sink].dequantize(formats[sink].quantize(scaled), weight.dtype)
            error += float(statistics.output_error((rounded - scaled) / per_input) / norms[sink])
        if error < least:
            best, least = scales, error
    return best


def smooth_scales(fold: Fold, statistics: InputStatistics, formats: Mapping[nn.Linear, NumberFormat]) -> Tensor:
    weights = torch.stack([sink.weight.detach().abs().amax(0) for sink in fold.sinks]).amax(0)
    ratio = statistics.largest.clamp_min(SMALLEST) ** SMOOTHING / weights.clamp_min(SMALLEST) ** (1 - SMOOTHING)
    return fold.reduce(ratio).clamp_min(SMALLEST)


def normalized(scales: Tensor) -> Tensor:
    """With the geometric mean of the largest and the smallest at 1."""
    scales = scales.clamp_min(SMALLEST)
    return scales / (scales.amax() * scales.amin()).sqrt()
