"""Turning pairs of coordinates (parts/position/rope.py) as one kernel: each is read once and written once.

    a' = a cos - b sin        b' = b cos + a sin        a the first half of a head's coordinates, b the second

The gradient is the same with the angle reversed. A program turns all heads of a token, which share its angles.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def turn_token(
    x, cos, sin, out, x_row, x_head, x_token, wave_row, wave_token, heads, length, sign,
    HEADS: tl.constexpr, HALF: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    token, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    head, pair = tl.arange(0, HEADS)[:, None], tl.arange(0, WIDE)[None, :]
    there = (head < heads) & (pair < HALF)
    x += b * x_row + token * x_token + head * x_head + pair
    first = tl.load(x, mask=there, other=0.0).to(tl.float32)  # (H, d / 2)
    second = tl.load(x + HALF, mask=there, other=0.0).to(tl.float32)
    wave = b * wave_row + token * wave_token + pair
    c = tl.load(cos + wave, mask=pair < HALF, other=0.0).to(tl.float32)
    s = tl.load(sin + wave, mask=pair < HALF, other=0.0).to(tl.float32) * sign
    out += ((b * heads + head) * length + token) * 2 * HALF + pair
    tl.store(out, (first * c - second * s).to(out.dtype.element_ty), mask=there)
    tl.store(out + HALF, (second * c + first * s).to(out.dtype.element_ty), mask=there)


@torch.library.custom_op("regard::turn", mutates_args=())
def turn(x: Tensor, cos: Tensor, sin: Tensor, back: bool = False) -> Tensor:
    """x (B, H, L, d) by angles (B, 1, L, d / 2), or backwards by them."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    rows, heads, length, dim = x.shape
    out = x.new_empty(x.shape)
    turn_token[length, rows](
        x, cos, sin, out, *x.stride()[:3], cos.stride(0) if len(cos) > 1 else 0, cos.stride(2), heads, length,
        -1.0 if back else 1.0,
        HEADS=triton.next_power_of_2(heads), HALF=dim // 2, WIDE=triton.next_power_of_2(dim // 2), num_warps=4,
    )  # fmt: skip
    return out


@turn.register_fake
def _(x, cos, sin, back=False) -> Tensor:
    return x.new_empty(x.shape)


def keep(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, cos, sin, ctx.back = inputs
    ctx.save_for_backward(cos, sin)


def reverse(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return turn(gradient, *ctx.saved_tensors, not ctx.back), None, None, None


turn.register_autograd(reverse, setup_context=keep)
