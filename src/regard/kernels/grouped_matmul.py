"""Grouped matrix product: x is sorted by expert, and each expert's matrix multiplies its own rows.

    y_t = W_{e(t)} x_t + b_{e(t)}          the rows of expert e end at ends[e]

The cost is that of T rows times one matrix, whatever the number of experts. torch's grouped product does it in one
call. Dtypes and widths that it does not support (float64, unaligned rows) run one contiguous slice per expert, as one
custom operator with its backward, so that compiled graphs can contain it although the slices depend on the data.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.compat import supports_grouped_mm
from regard.kernels.autocast import autocast_like_linear


def sort_by_expert(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """chosen (N,) -> the order (N,) that sorts by expert, and the end of each expert's rows (X,).

    Rows without an expert (index X) come last, after the last end.
    """
    sorted_experts, order = chosen.sort(stable=True)
    return order, torch.searchsorted(sorted_experts, torch.arange(experts, device=chosen.device), right=True)


def grouped_linear(x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
    """x (T, I) sorted by expert, weight (X, O, I), bias (X, O), ends (X,) with ends[-1] = T -> (T, O)"""
    x, weight = autocast_like_linear(x, weight)
    if supports_grouped_mm(x, weight):
        y = F.grouped_mm(x, weight.transpose(1, 2), offs=ends.to(torch.int32))
    else:
        y = matmul_slices(x, weight, ends)
    return y if bias is None else y + bias.to(y.dtype)[row_experts(x, ends)]


def row_experts(x: Tensor, ends: Tensor) -> Tensor:
    """(T,) the expert of each row of x"""
    return torch.searchsorted(ends, torch.arange(len(x), device=x.device), right=True)


@torch.library.custom_op("regard::matmul_slices", mutates_args=())
def matmul_slices(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    y = x.new_empty(len(x), weight.shape[1])  # (T, O)
    for matrix, rows in zip(weight, expert_rows(ends), strict=True):
        y[rows] = x[rows] @ matrix.T
    return y


@torch.library.custom_op("regard::outer_slices", mutates_args=())
def outer_slices(y: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """Σ_t y_t x_tᵀ over the rows of each expert: the gradient of its matrix."""
    return torch.stack([y[rows].T @ x[rows] for rows in expert_rows(ends)])  # (X, O, I)


def expert_rows(ends: Tensor) -> list[slice]:
    """The rows of each expert."""
    bounds = [0, *ends.tolist()]
    return [slice(*pair) for pair in pairwise(bounds)]


def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight, ends = ctx.saved_tensors
    return matmul_slices(grad, weight.transpose(1, 2), ends), outer_slices(grad, x, ends), None


matmul_slices.register_fake(lambda x, weight, ends: x.new_empty(len(x), weight.shape[1]))
outer_slices.register_fake(lambda y, x, ends: x.new_empty(len(ends), y.shape[1], x.shape[1]))
matmul_slices.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
