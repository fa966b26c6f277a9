"""Rounding to nearest, and the search for a smaller range: outliers are clipped, so that all others get finer steps.

    W' = Q(clamp(W, c min W, c max W))        the c in [½, 1] with the least error, for each group of inputs

The error of a group is (w - w')ᵀ H (w - w') with the part of H for its inputs. c = 1 is among the candidates. As in the
code of AWQ (Lin et al. 2023).
"""

import torch
from torch import Tensor

from regard.formats.base import NumberFormat
from regard.quantization.statistics import InputStatistics

RATIOS = tuple(1 - step / 40 for step in range(21))


def round_to_nearest(weight: Tensor, statistics: InputStatistics, format: NumberFormat) -> dict[str, Tensor]:
    return format.quantize(weight)


def rounding_error(weight: Tensor, statistics: InputStatistics, format: NumberFormat) -> float:
    """The relative error of the output, if the weight is rounded to nearest."""
    rounded = format.dequantize(format.quantize(weight), weight.dtype)
    return statistics.relative_error(rounded - weight, weight)


def clip_and_round(weight: Tensor, statistics: InputStatistics, format: NumberFormat) -> dict[str, Tensor]:
    return format.quantize(clip_weight(weight, statistics, format))


def clip_weight(weight: Tensor, statistics: InputStatistics, format: NumberFormat) -> Tensor:
    """The weight (outputs, inputs) with each group clamped to the range of the least error."""
    size = format.group_size(weight.shape[-1])
    groups = weight.unflatten(-1, (-1, size))  # (O, G, S)
    products = group_products(statistics.products, size)  # (G, S, S)
    low, high = groups.amin(-1, keepdim=True).clamp_max(0), groups.amax(-1, keepdim=True).clamp_min(0)
    best, least = groups, torch.full(groups.shape[:-1], torch.inf, dtype=products.dtype, device=weight.device)
    for ratio in RATIOS:
        clipped = groups.clamp(ratio * low, ratio * high)
        rounded = format.dequantize(format.quantize(clipped.flatten(-2)), weight.dtype).view_as(groups)
        difference = (rounded - groups).to(products.dtype).transpose(0, 1)  # (G, O, S)
        error = ((difference @ products) * difference).sum(-1).t()  # (O, G)
        best = torch.where((error < least).unsqueeze(-1), clipped, best)
        least = torch.minimum(error, least)
    return best.flatten(-2)


def group_products(products: Tensor, size: int) -> Tensor:
    """The blocks (groups, size, size) on the diagonal of H."""
    count = len(products) // size
    return torch.stack([products[i * size : (i + 1) * size, i * size : (i + 1) * size] for i in range(count)])
