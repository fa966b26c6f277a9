"""GPTQ: inputs are rounded one after the other, and the weights of later inputs compensate the error of each.

    w'_j = Q(w_j)        e = (w_j - w'_j) / U_jj        w_k -= e U_jk  for k > j        UᵀU = (H + λ I)⁻¹, U upper

This is the exact solution of min Σ ‖(W - W') x‖² for the weights that are still free, given those that are rounded
(optimal brain surgeon). λ is `damping` times the mean of the diagonal of H. `by_size` starts with the inputs of the
largest H_jj ("act-order"), whose errors cost most. Scales are chosen before, by the search for the best range, so they
do not depend on the order. Updates of inputs beyond a block of 128 are done once per block, as one product.
Frantar et al. 2022 (arXiv:2210.17323).
"""

import torch
from torch import Tensor

from regard.formats.base import NumberFormat, Stored
from regard.quantization.clipping import clip_and_round
from regard.quantization.statistics import InputStatistics

DAMPING, BLOCK = 0.01, 128


def gptq(weight: Tensor, statistics: InputStatistics, format: NumberFormat) -> dict[str, Tensor]:
    return round_with_compensation(weight, statistics.products, format, clip_and_round(weight, statistics, format))


def round_with_compensation(
    weight: Tensor,
    products: Tensor,
    format: NumberFormat,
    stored: Stored,
    damping: float = DAMPING,
    by_size: bool = True,
    block: int = BLOCK,
) -> dict[str, Tensor]:
    """The codes of a weight (outputs, inputs) for H and the stored scales."""
    order = torch.arange(len(products), device=weight.device)
    if by_size:
        order = products.diagonal().argsort(descending=True, stable=True)
    free = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))[:, order]  # (O, I)
    factor = inverse_factor(products[order][:, order], damping).to(free.dtype)  # U
    grid = {name: tensor[:, order] for name, tensor in format.grid(stored).items()}
    rounded = torch.empty_like(free)
    for start in range(0, len(order), block):
        end = min(start + block, len(order))
        errors = torch.empty_like(free[:, start:end])
        for j in range(start, end):
            scales = {name: tensor[:, j] for name, tensor in grid.items()}
            rounded[:, j] = format.nearest(free[:, j], scales)
            errors[:, j - start] = (free[:, j] - rounded[:, j]) / factor[j, j]
            free[:, j + 1 : end].addr_(errors[:, j - start], factor[j, j + 1 : end], alpha=-1)
        free[:, end:] -= errors @ factor[start:end, end:]
    return format.requantize(rounded[:, order.argsort()], stored)


def inverse_factor(products: Tensor, damping: float) -> Tensor:
    """U, upper, with UᵀU = (H + λ I)⁻¹ in float64. Inputs that are always zero get a diagonal of 1."""
    damped = products.double()
    diagonal = damped.diagonal()
    diagonal[diagonal == 0] = 1.0
    diagonal += damping * diagonal.mean()
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    return torch.linalg.cholesky(inverse, upper=True)
