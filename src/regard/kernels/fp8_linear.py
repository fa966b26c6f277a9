"""A linear layer whose matrix products run in 8-bit floating point, forward and backward, with bfloat16 results.

    s_A = max |A| / max of the format        Q(A) = round(A / s_A)        A B ≈ s_A s_B Q(A) Q(B)
    y = x Wᵀ        dx = dy W        dW = dyᵀ x

Each tensor has one scale, computed from its present values (dynamic scaling; Micikevicius et al. 2022). Activations and
weights use e4m3 (3 bits of mantissa), gradients e5m2 (a larger range). Sums run in float32. Weights stay float32 in the
optimizer. A GPU needs compute capability 8.9 or newer; a CPU emulates the products.
Both dims of the weight must be divisible by 16.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # of the dims of a product


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., in), weight (out, in), bias (out,) -> (..., out) in bfloat16."""
    rows = x.flatten(0, -2)
    padded = F.pad(rows, (0, 0, 0, -len(rows) % MULTIPLE))  # the product dyᵀ x sums over the rows
    y = Float8Product.apply(padded, weight)[: len(rows)].unflatten(0, x.shape[:-1])
    return y if bias is None else y + bias.to(y.dtype)


class Float8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        (qx, x_scale), (qw, w_scale) = quantize(x, E4M3), quantize(weight, E4M3)
        ctx.save_for_backward(qx, x_scale, qw, w_scale)
        ctx.dtypes = x.dtype, weight.dtype
        return product(qx, x_scale, qw.T, w_scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        qx, x_scale, qw, w_scale = ctx.saved_tensors
        qdy, dy_scale = quantize(dy, E5M2)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = product(qdy, dy_scale, by_columns(qw), w_scale).to(ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            dw = product(qdy.T.contiguous(), dy_scale, by_columns(qx), x_scale).to(ctx.dtypes[1])
        return dx, dw


def quantize(a: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Q(A) and s_A."""
    limit = torch.finfo(dtype).max
    scale = a.abs().amax().float().clamp(min=1e-12) / limit
    return (a.float() / scale).clamp(-limit, limit).to(dtype), scale


def by_columns(a: Tensor) -> Tensor:
    """The same matrix with contiguous columns, as the second factor of a product must have them."""
    return a.T.contiguous().T


def product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    return torch._scaled_mm(a, b, scale_a=a_scale, scale_b=b_scale, out_dtype=torch.bfloat16, use_fast_accum=True)
