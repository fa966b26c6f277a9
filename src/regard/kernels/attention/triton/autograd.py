"""The kernels as operators that PyTorch knows: with gradients, and whole in the graphs of torch.compile."""

import math
from typing import Any

import torch
from torch import Tensor

from regard.kernels.attention.triton.launch import LaunchConfig, run_backward, run_forward


@torch.library.custom_op("regard::flash", mutates_args=())
def flash(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, bias: Tensor | None, where: list[Tensor],
    scale: float, cap: float, before: int, after: int, first: int, kind: str, reach: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out (B, H, L, Ev) and log₂ Σ 2^s (B, H, L); `where` is empty for whole texts, else what `placed` makes."""
    recipe = LaunchConfig(scale, cap, before, after, first, kind, reach)
    return run_forward(q, k, v, sinks, bias, where, recipe)[:2]


@flash.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    batch, heads, length, _ = q.shape
    out = q.new_empty(batch, length, heads, v.shape[-1]).transpose(1, 2)
    return out, q.new_empty(batch, heads, length, dtype=torch.float32)


@torch.library.custom_op("regard::flash_backward", mutates_args=())
def flash_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, bias: Tensor | None,
    where: list[Tensor], learned: bool,
    scale: float, cap: float, before: int, after: int, first: int, kind: str, reach: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    recipe = LaunchConfig(scale, cap, before, after, first, kind, reach)
    return run_backward(d_out, q, k, v, out, log_sum, bias, where, recipe, learned)


@flash_backward.register_fake
def _(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, bias: Tensor | None,
    where: list[Tensor], learned: bool, *numbers: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    d_bias = torch.empty_like(bias) if learned and bias is not None else log_sum.new_empty(0)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), d_bias, torch.empty_like(log_sum)


def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, bias, where, *ctx.numbers = inputs
    ctx.learned = bias is not None and bias.requires_grad
    ctx.save_for_backward(q, k, v, *output, sinks, bias, *where)


def differentiate(ctx: Any, d_out: Tensor, _d_log_sum: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, log_sum, sinks, bias, *where = ctx.saved_tensors
    dq, dk, dv, d_bias, delta = flash_backward(d_out, q, k, v, out, log_sum, bias, where, ctx.learned, *ctx.numbers)
    d_sinks = None
    if sinks is not None:
        shares = (sinks.float().view(1, -1, 1) - log_sum * math.log(2)).exp()
        d_sinks = -(shares * delta).sum((0, 2)).to(sinks.dtype)
    nothing = [None] * len(where)
    return dq, dk, dv, d_sinks, d_bias if ctx.learned else None, nothing, *[None] * len(ctx.numbers)


flash.register_autograd(differentiate, setup_context=keep)
