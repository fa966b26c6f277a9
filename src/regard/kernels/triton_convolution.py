"""The short convolution (kernels/convolution.py) as one kernel: each value is read once from memory and written once.

    y_t = Σ_{i<k} w_i ⊙ x_{t-i} (+ bias)         dx_t = Σ_i w_i ⊙ dy_{t+i}         dw_i = Σ_t dy_t ⊙ x_{t-i}

over pairs of the same document; what stands before the first token is the tail, of document 0. A program takes some
tokens of some channels; its sums of dw are added up afterwards, so that they are the same in every run.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS, TILE, CHANNELS = 128, 16, 128  # of a program, at a time, and side by side


@triton.jit
def convolve_kernel(
    X, Weight, Bias, Tail, Docs, Y, length, channels,
    TAPS: tl.constexpr, TOKENS: tl.constexpr, TILE: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    b, first, d = place(length, TOKENS, CHANNELS)
    for start in range(first, tl.minimum(first + TOKENS, length), TILE):
        t = start + tl.arange(0, TILE)
        y = tl.zeros((TILE, CHANNELS), tl.float32)
        if Bias is not None:
            y += tl.load(Bias + d, d < channels, 0.0).to(tl.float32)[None, :]
        for i in tl.static_range(TAPS):
            w = tl.load(Weight + i * channels + d, d < channels, 0.0).to(tl.float32)
            y += w[None, :] * earlier(X, Tail, Docs, b, t, i, d, length, channels, TAPS)
        there = (t < length)[:, None] & (d < channels)[None, :]
        tl.store(Y + (b * length + t)[:, None] * channels + d[None, :], y.to(Y.dtype.element_ty), there)


@triton.jit
def gradient_kernel(
    X, Weight, Tail, Docs, dY, dX, dTail, dWeight, dBias, length, channels,
    TAPS: tl.constexpr, BEFORE: tl.constexpr, TOKENS: tl.constexpr, TILE: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """dWeight (programs, taps, D) and dBias (programs, D) are of each program's tokens; BEFORE is taps - 1 or more."""
    b, first, d = place(length, TOKENS, CHANNELS)
    end = tl.minimum(first + TOKENS, length)
    for start in range(first, end, TILE):
        t = start + tl.arange(0, TILE)
        dx = from_later(dY, Weight, Docs, b, t, d, length, channels, TAPS)
        there = (t < length)[:, None] & (d < channels)[None, :]
        tl.store(dX + (b * length + t)[:, None] * channels + d[None, :], dx.to(dX.dtype.element_ty), there)
    if first == 0 and TAPS > 1:
        t = tl.arange(0, BEFORE) - (TAPS - 1)
        dx = from_later(dY, Weight, Docs, b, t, d, length, channels, TAPS)
        there = (t < 0)[:, None] & (d < channels)[None, :]
        tail = (b * (TAPS - 1) + TAPS - 1 + t)[:, None] * channels + d[None, :]
        tl.store(dTail + tail, dx.to(dTail.dtype.element_ty), there)
    program = tl.program_id(0).to(tl.int64)
    for i in tl.static_range(TAPS):  # dy comes from the cache again
        sums = tl.zeros((TILE, CHANNELS), tl.float32)
        for start in range(first, end, TILE):
            t = start + tl.arange(0, TILE)
            sums += tokens(dY, b, t, d, length, channels) * earlier(X, Tail, Docs, b, t, i, d, length, channels, TAPS)
        tl.store(dWeight + (program * TAPS + i) * channels + d, tl.sum(sums, 0), d < channels)
    if dBias is not None:
        sums = tl.zeros((TILE, CHANNELS), tl.float32)
        for start in range(first, end, TILE):
            sums += tokens(dY, b, start + tl.arange(0, TILE), d, length, channels)
        tl.store(dBias + program * channels + d, tl.sum(sums, 0), d < channels)


@triton.jit
def place(length, TOKENS: tl.constexpr, CHANNELS: tl.constexpr):
    """This program's row, its first token, its channels."""
    programs = tl.cdiv(length, TOKENS)
    b, first = tl.program_id(0).to(tl.int64) // programs, tl.program_id(0) % programs * TOKENS
    return b, first, tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)


@triton.jit
def tokens(X, b, t, d, length, channels):
    """(T, D) in float32, zeros outside"""
    there = ((t >= 0) & (t < length))[:, None] & (d < channels)[None, :]
    return tl.load(X + (b * length + t)[:, None] * channels + d[None, :], there, 0.0).to(tl.float32)


@triton.jit
def document(Docs, b, t, length):
    return tl.load(Docs + b * length + t, (t >= 0) & (t < length), 0)


@triton.jit
def earlier(X, Tail, Docs, b, t, i, d, length, channels, TAPS: tl.constexpr):
    """What stands i tokens before each: of the text or of the tail; zeros where it is of another document."""
    x = tokens(X, b, t - i, d, length, channels)
    if i > 0:
        tail = (b * (TAPS - 1) + TAPS - 1 + t - i)[:, None] * channels + d[None, :]
        x += tl.load(Tail + tail, (t < i)[:, None] & (d < channels)[None, :], 0.0).to(tl.float32)
        if Docs is not None:
            x = tl.where((document(Docs, b, t, length) == document(Docs, b, t - i, length))[:, None], x, 0.0)
    return x


@triton.jit
def from_later(dY, Weight, Docs, b, t, d, length, channels, TAPS: tl.constexpr):
    """Σ_i w_i ⊙ dy_{t+i}"""
    dx = tokens(dY, b, t, d, length, channels) * tl.load(Weight + d, d < channels, 0.0).to(tl.float32)[None, :]
    for i in tl.static_range(1, TAPS):
        dy = tokens(dY, b, t + i, d, length, channels)
        if Docs is not None:
            dy = tl.where((document(Docs, b, t, length) == document(Docs, b, t + i, length))[:, None], dy, 0.0)
        dx += dy * tl.load(Weight + i * channels + d, d < channels, 0.0).to(tl.float32)[None, :]
    return dx


@torch.library.custom_op("regard::convolve", mutates_args=())
def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, tail: Tensor, docs: Tensor | None) -> Tensor:
    """x (B, L, D), weight (k, D), bias (D,), tail (B, k - 1, D), docs (B, L) -> y (B, L, D)"""
    batch, length, channels = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grid = (batch * triton.cdiv(length, TOKENS), triton.cdiv(channels, CHANNELS))
    case = (x, weight, bias, tail, docs)
    convolve_kernel[grid](*map(dense, case), y, length, channels, len(weight), TOKENS, TILE, CHANNELS)
    return y


@convolve.register_fake
def _(x, weight, bias, tail, docs) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@torch.library.custom_op("regard::convolve_backward", mutates_args=())
def gradients(
    x: Tensor, weight: Tensor, bias: Tensor | None, tail: Tensor, docs: Tensor | None, dy: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (batch, length, channels), taps = x.shape, len(weight)
    dx, d_tail = (torch.empty(of.shape, dtype=of.dtype, device=of.device) for of in (x, tail))
    grid = (batch * triton.cdiv(length, TOKENS), triton.cdiv(channels, CHANNELS))
    d_weight = torch.empty(grid[0], taps, channels, dtype=torch.float32, device=x.device)
    d_bias = None if bias is None else torch.empty(grid[0], channels, dtype=torch.float32, device=x.device)
    gradient_kernel[grid](
        *map(dense, (x, weight, tail, docs, dy)), dx, d_tail, d_weight, d_bias, length, channels,
        taps, triton.next_power_of_2(max(taps - 1, 1)), TOKENS, TILE, CHANNELS,
    )  # fmt: skip
    d_bias = x.new_empty(0) if bias is None or d_bias is None else d_bias.sum(0).to(bias.dtype)
    return dx, d_weight.sum(0).to(weight.dtype), d_bias, d_tail


@gradients.register_fake
def _(x, weight, bias, tail, docs, dy):
    like = (x, weight, x.new_empty(0) if bias is None else bias, tail)
    return tuple(torch.empty(of.shape, dtype=of.dtype, device=of.device) for of in like)


def remember(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, bias, tail, docs = ctx.saved_tensors  # once: activation checkpointing makes them anew each time
    dx, d_weight, d_bias, d_tail = gradients(x, weight, bias, tail, docs, dy)
    return dx, d_weight, None if bias is None else d_bias, d_tail, None


convolve.register_autograd(backward, setup_context=remember)


def dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()
