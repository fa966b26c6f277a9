"""The kernels as custom operators of PyTorch, with gradients and support for torch.compile."""

import math
from typing import Any

import torch
from torch import Tensor

from regard.kernels.attention.triton.launch import LaunchConfig, run_backward, run_forward


@torch.library.custom_op("regard::flash", mutates_args=())
def flash(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, bias: Tensor | None, token_arrays: list[Tensor],
    scale: float, cap: float, before: int, after: int, first: int, kind: str, max_distance: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out (B, H, L, Ev) and log₂ Σ 2^s (B, H, L); `token_arrays` is empty for an ordered layout."""
    config = LaunchConfig(scale, cap, before, after, first, kind, max_distance)
    return run_forward(q, k, v, sinks, bias, token_arrays, config)[:2]


@flash.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    batch, heads, length, _ = q.shape
    out = q.new_empty(batch, length, heads, v.shape[-1]).transpose(1, 2)
    return out, q.new_empty(batch, heads, length, dtype=torch.float32)


@torch.library.custom_op("regard::flash_backward", mutates_args=())
def flash_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, bias: Tensor | None,
    token_arrays: list[Tensor], learned: bool,
    scale: float, cap: float, before: int, after: int, first: int, kind: str, max_distance: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    config = LaunchConfig(scale, cap, before, after, first, kind, max_distance)
    return run_backward(d_out, q, k, v, out, log_sum, bias, token_arrays, config, learned)


@flash_backward.register_fake
def _(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, bias: Tensor | None,
    token_arrays: list[Tensor], learned: bool, *scalars: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    d_bias = torch.empty_like(bias) if learned and bias is not None else log_sum.new_empty(0)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), d_bias, torch.empty_like(log_sum)


def save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, bias, token_arrays, *ctx.scalars = inputs
    ctx.learned = bias is not None and bias.requires_grad
    ctx.save_for_backward(q, k, v, *output, sinks, bias, *token_arrays)


def backward(ctx: Any, d_out: Tensor, _d_log_sum: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, log_sum, sinks, bias, *token_arrays = ctx.saved_tensors
    dq, dk, dv, d_bias, delta = flash_backward(
        d_out, q, k, v, out, log_sum, bias, token_arrays, ctx.learned, *ctx.scalars
    )
    d_sinks = None
    if sinks is not None:
        weights = (sinks.float().view(1, -1, 1) - log_sum * math.log(2)).exp()
        d_sinks = -(weights * delta).sum((0, 2)).to(sinks.dtype)
    no_gradients = [None] * len(token_arrays)
    return dq, dk, dv, d_sinks, d_bias if ctx.learned else None, no_gradients, *[None] * len(ctx.scalars)


flash.register_autograd(backward, setup_context=save_inputs)
