"""The short convolution of convolution.py as one kernel with one read and one write per number.

    y_t = Σ_{i<k} w_i ⊙ x_{t-i} (+ bias)         dx_t = Σ_i w_i ⊙ dy_{t+i}         dw_i = Σ_t dy_t ⊙ x_{t-i}

over pairs of the same document; the tail precedes the first token and belongs to document 0. A program handles a tile
of tokens and channels; its partial dw are summed afterwards, so that the result is deterministic.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS, TILE, CHANNELS = 128, 16, 128  # tokens per program, tokens per step, channels per program


@triton.jit
def convolve_kernel(
    X, Weight, Bias, Tail, Documents, Y, length, channels,
    TAPS: tl.constexpr, TOKENS: tl.constexpr, TILE: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    b, first, d = program_range(length, TOKENS, CHANNELS)
    for start in range(first, tl.minimum(first + TOKENS, length), TILE):
        t = start + tl.arange(0, TILE)
        y = tl.zeros((TILE, CHANNELS), tl.float32)
        if Bias is not None:
            y += tl.load(Bias + d, d < channels, 0.0).to(tl.float32)[None, :]
        for i in tl.static_range(TAPS):
            w = tl.load(Weight + i * channels + d, d < channels, 0.0).to(tl.float32)
            y += w[None, :] * load_earlier(X, Tail, Documents, b, t, i, d, length, channels, TAPS)
        inside = (t < length)[:, None] & (d < channels)[None, :]
        tl.store(Y + (b * length + t)[:, None] * channels + d[None, :], y.to(Y.dtype.element_ty), inside)


@triton.jit
def gradient_kernel(
    X, Weight, Tail, Documents, dY, dX, dTail, dWeight, dBias, length, channels,
    TAPS: tl.constexpr, TAIL_ROWS: tl.constexpr, TOKENS: tl.constexpr, TILE: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """dWeight (programs, taps, D) and dBias (programs, D) are partial sums per program.

    TAIL_ROWS is a power of two that is at least taps - 1.
    """
    b, first, d = program_range(length, TOKENS, CHANNELS)
    end = tl.minimum(first + TOKENS, length)
    for start in range(first, end, TILE):
        t = start + tl.arange(0, TILE)
        dx = input_gradient(dY, Weight, Documents, b, t, d, length, channels, TAPS)
        inside = (t < length)[:, None] & (d < channels)[None, :]
        tl.store(dX + (b * length + t)[:, None] * channels + d[None, :], dx.to(dX.dtype.element_ty), inside)
    if first == 0 and TAPS > 1:
        t = tl.arange(0, TAIL_ROWS) - (TAPS - 1)
        dx = input_gradient(dY, Weight, Documents, b, t, d, length, channels, TAPS)
        inside = (t < 0)[:, None] & (d < channels)[None, :]
        tail = (b * (TAPS - 1) + TAPS - 1 + t)[:, None] * channels + d[None, :]
        tl.store(dTail + tail, dx.to(dTail.dtype.element_ty), inside)
    program = tl.program_id(0).to(tl.int64)
    for i in tl.static_range(TAPS):  # dy is still in the cache
        sums = tl.zeros((TILE, CHANNELS), tl.float32)
        for start in range(first, end, TILE):
            t = start + tl.arange(0, TILE)
            sums += load_tokens(dY, b, t, d, length, channels) * load_earlier(
                X, Tail, Documents, b, t, i, d, length, channels, TAPS
            )
        tl.store(dWeight + (program * TAPS + i) * channels + d, tl.sum(sums, 0), d < channels)
    if dBias is not None:
        sums = tl.zeros((TILE, CHANNELS), tl.float32)
        for start in range(first, end, TILE):
            sums += load_tokens(dY, b, start + tl.arange(0, TILE), d, length, channels)
        tl.store(dBias + program * channels + d, tl.sum(sums, 0), d < channels)


@triton.jit
def program_range(length, TOKENS: tl.constexpr, CHANNELS: tl.constexpr):
    """The row, first token and channels of this program."""
    programs = tl.cdiv(length, TOKENS)
    b, first = tl.program_id(0).to(tl.int64) // programs, tl.program_id(0) % programs * TOKENS
    return b, first, tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)


@triton.jit
def load_tokens(X, b, t, d, length, channels):
    """(T, D) in float32; zeros outside of the sequence"""
    inside = ((t >= 0) & (t < length))[:, None] & (d < channels)[None, :]
    return tl.load(X + (b * length + t)[:, None] * channels + d[None, :], inside, 0.0).to(tl.float32)


@triton.jit
def load_document(Documents, b, t, length):
    return tl.load(Documents + b * length + t, (t >= 0) & (t < length), 0)


@triton.jit
def load_earlier(X, Tail, Documents, b, t, i, d, length, channels, TAPS: tl.constexpr):
    """The input i tokens before each token, from x or the tail; zeros if it is of another document."""
    x = load_tokens(X, b, t - i, d, length, channels)
    if i > 0:
        tail = (b * (TAPS - 1) + TAPS - 1 + t - i)[:, None] * channels + d[None, :]
        x += tl.load(Tail + tail, (t < i)[:, None] & (d < channels)[None, :], 0.0).to(tl.float32)
        if Documents is not None:
            x = tl.where(
                (load_document(Documents, b, t, length) == load_document(Documents, b, t - i, length))[:, None], x, 0.0
            )
    return x


@triton.jit
def input_gradient(dY, Weight, Documents, b, t, d, length, channels, TAPS: tl.constexpr):
    """dx_t = Σ_i w_i ⊙ dy_{t+i}"""
    dx = load_tokens(dY, b, t, d, length, channels) * tl.load(Weight + d, d < channels, 0.0).to(tl.float32)[None, :]
    for i in tl.static_range(1, TAPS):
        dy = load_tokens(dY, b, t + i, d, length, channels)
        if Documents is not None:
            dy = tl.where(
                (load_document(Documents, b, t, length) == load_document(Documents, b, t + i, length))[:, None], dy, 0.0
            )
        dx += dy * tl.load(Weight + i * channels + d, d < channels, 0.0).to(tl.float32)[None, :]
    return dx


@torch.library.custom_op("regard::convolve", mutates_args=())
def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, tail: Tensor, documents: Tensor | None) -> Tensor:
    """x (B, L, D), weight (k, D), bias (D,), tail (B, k - 1, D), documents (B, L) -> y (B, L, D)"""
    batch, length, channels = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grid = (batch * triton.cdiv(length, TOKENS), triton.cdiv(channels, CHANNELS))
    inputs = (x, weight, bias, tail, documents)
    convolve_kernel[grid](*map(contiguous, inputs), y, length, channels, len(weight), TOKENS, TILE, CHANNELS)
    return y


@convolve.register_fake
def _(x, weight, bias, tail, documents) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@torch.library.custom_op("regard::convolve_backward", mutates_args=())
def convolve_backward(
    x: Tensor, weight: Tensor, bias: Tensor | None, tail: Tensor, documents: Tensor | None, dy: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (batch, length, channels), taps = x.shape, len(weight)
    dx, d_tail = (torch.empty(a.shape, dtype=a.dtype, device=a.device) for a in (x, tail))
    grid = (batch * triton.cdiv(length, TOKENS), triton.cdiv(channels, CHANNELS))
    d_weight = torch.empty(grid[0], taps, channels, dtype=torch.float32, device=x.device)
    d_bias = None if bias is None else torch.empty(grid[0], channels, dtype=torch.float32, device=x.device)
    gradient_kernel[grid](
        *map(contiguous, (x, weight, tail, documents, dy)), dx, d_tail, d_weight, d_bias, length, channels,
        taps, triton.next_power_of_2(max(taps - 1, 1)), TOKENS, TILE, CHANNELS,
    )  # fmt: skip
    d_bias = x.new_empty(0) if bias is None or d_bias is None else d_bias.sum(0).to(bias.dtype)
    return dx, d_weight.sum(0).to(weight.dtype), d_bias, d_tail


@convolve_backward.register_fake
def _(x, weight, bias, tail, documents, dy):
    inputs = (x, weight, x.new_empty(0) if bias is None else bias, tail)
    return tuple(torch.empty(a.shape, dtype=a.dtype, device=a.device) for a in inputs)


def save_inputs(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    # Read once: activation checkpointing recomputes them at each access.
    x, weight, bias, tail, documents = ctx.saved_tensors
    dx, d_weight, d_bias, d_tail = convolve_backward(x, weight, bias, tail, documents, dy)
    return dx, d_weight, None if bias is None else d_bias, d_tail, None


convolve.register_autograd(backward, setup_context=save_inputs)


def contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()
