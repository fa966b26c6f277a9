"""The linear layer of a decode step in plain torch, and random arguments for it."""

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.parts.feedforward import ACTIVATIONS
from tests.kernels.triton_device import DEVICE

OUTPUTS, COLUMNS, EPS = 72, 200, 1e-5


def compute(
    x: Tensor, weight: Tensor, norm: Tensor | None, bias: Tensor | None, residual: Tensor | None, act: str | None
) -> Tensor:
    """The layer in plain torch, in the dtype of its arguments."""
    if norm is not None:
        x = F.rms_norm(x, x.shape[-1:], norm, EPS)
    y = F.linear(x, weight, bias)
    if act is not None:
        gate, up = y.chunk(2, -1)
        y = ACTIVATIONS[act](gate) * up
    return y if residual is None else y + residual


def draw(
    tokens: int,
    act: str | None,
    options: tuple[bool, bool, bool],
    dtype: torch.dtype,
    outputs: int = OUTPUTS,
    columns: int = COLUMNS,
) -> list:
    """x, weight, and those of norm, bias and residual that the options select."""
    torch.manual_seed(0)
    rows = outputs if act is None else 2 * outputs
    tensors = (torch.rand(columns) + 0.5, torch.randn(rows), torch.randn(tokens, outputs))
    chosen = [tensor if use else None for tensor, use in zip(tensors, options, strict=True)]
    drawn = [torch.randn(tokens, columns), torch.randn(rows, columns) / columns**0.5, *chosen]
    return [None if tensor is None else tensor.to(DEVICE, dtype) for tensor in drawn]
