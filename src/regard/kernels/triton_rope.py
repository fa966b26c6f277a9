"""Rotation of pairs of coordinates (parts/position/rope.py) as one kernel with one read and one write per number.

    a' = a cos - b sin        b' = b cos + a sin        a the first half of a head's coordinates, b the second

The gradient is the rotation by the opposite angle. A program rotates all heads of a token, which share its angles.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def rotate_token(
    x, cos, sin, out, x_row_stride, x_head_stride, x_token_stride, angle_row_stride, angle_token_stride,
    heads, length, sign, PADDED_HEADS: tl.constexpr, HALF: tl.constexpr, PADDED_HALF: tl.constexpr,
):  # fmt: skip
    token, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    head, pair = tl.arange(0, PADDED_HEADS)[:, None], tl.arange(0, PADDED_HALF)[None, :]
    inside = (head < heads) & (pair < HALF)
    x += b * x_row_stride + token * x_token_stride + head * x_head_stride + pair
    first = tl.load(x, mask=inside, other=0.0).to(tl.float32)  # (H, d / 2)
    second = tl.load(x + HALF, mask=inside, other=0.0).to(tl.float32)
    angle = b * angle_row_stride + token * angle_token_stride + pair
    c = tl.load(cos + angle, mask=pair < HALF, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=pair < HALF, other=0.0).to(tl.float32) * sign
    out += ((b * heads + head) * length + token) * 2 * HALF + pair
    tl.store(out, (first * c - second * s).to(out.dtype.element_ty), mask=inside)
    tl.store(out + HALF, (second * c + first * s).to(out.dtype.element_ty), mask=inside)


@torch.library.custom_op("regard::rotate", mutates_args=())
def rotate(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """Rotate x (B, H, L, d) by angles of these cos and sin (B, 1, L, d / 2), or by the opposite angles."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    rows, heads, length, dim = x.shape
    out = x.new_empty(x.shape)
    rotate_token[length, rows](
        x, cos, sin, out, *x.stride()[:3], cos.stride(0) if len(cos) > 1 else 0, cos.stride(2), heads, length,
        -1.0 if inverse else 1.0,
        PADDED_HEADS=triton.next_power_of_2(heads), HALF=dim // 2, PADDED_HALF=triton.next_power_of_2(dim // 2),
        num_warps=4,
    )  # fmt: skip
    return out


@rotate.register_fake
def _(x, cos, sin, inverse=False) -> Tensor:
    return x.new_empty(x.shape)


def save_angles(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, cos, sin, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin)


def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return rotate(gradient, *ctx.saved_tensors, not ctx.inverse), None, None, None


rotate.register_autograd(backward, setup_context=save_angles)
