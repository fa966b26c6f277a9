"""The short causal convolution of every channel by itself, as recurrent mixers need it.

    y_t = Σ_{i<k} w_i ⊙ x_{t-i} (+ bias)          over valid tokens of the same document

On a CPU a sum of shifted copies: with a handful of taps that is as fast as a grouped convolution, and it runs along
channels as the stream lies in memory. On a GPU one kernel (triton_convolution.py). Tokens that are not valid are set
aside first, so padding may stand anywhere. The tail is what the tokens before left: the last k - 1 values, zeros where
a text begins.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.compat import cannot_triton
from regard.layout import TokenLayout

MOST_TAPS = 8  # that the kernel unrolls


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, tail: Tensor, layout: TokenLayout
) -> tuple[Tensor, Tensor]:
    """x (B, L, D), weight (k, D), the newest token's tap first, tail (B, k - 1, D) -> y (B, L, D), the next tail."""
    order = layout.derived(valid_first)
    segments = None if layout.segments is None else pick(layout.segments, order)
    dtype, behind = torch.promote_types(x.dtype, weight.dtype), len(weight) - 1
    x, tail = pick(x, order).to(dtype), tail.to(dtype)
    if fused(x, weight):
        y = by_kernel(x, weight, bias, tail, segments)
        line = torch.cat([tail, x if layout.valid is not None else x[:, max(x.shape[1] - behind, 0) :]], 1)
    else:
        line = torch.cat([tail, x], 1)  # (B, k - 1 + L, D)
        y = shifted(line, weight, bias, segments)
    y = y if order is None else pick(y, order.argsort(1))  # each token back to its place
    return y, latest(line, behind, layout.valid)


def fused(x: Tensor, weight: Tensor) -> bool:
    return cannot_triton(x.device) is None and x.dtype != torch.float64 and x.shape[1] > 1 and len(weight) <= MOST_TAPS


def by_kernel(x: Tensor, weight: Tensor, bias: Tensor | None, tail: Tensor, segments: Tensor | None) -> Tensor:
    from regard.kernels.triton_convolution import convolve  # imports triton, which need not be installed

    return convolve(x, weight, bias, tail, segments)


def shifted(line: Tensor, weight: Tensor, bias: Tensor | None, segments: Tensor | None) -> Tensor:
    behind = len(weight) - 1
    length = line.shape[1] - behind
    y = line[:, behind:] * weight[0]
    for i, tap in enumerate(weight[1:], 1):
        before = line[:, behind - i : behind - i + length]  # (B, L, D)
        if segments is not None:
            same = segments == F.pad(segments, (i, 0))[:, :length]
            before = before.where(same.unsqueeze(-1), 0.0)
        y.addcmul_(before, tap)
    return y if bias is None else y.add_(bias)


def latest(line: Tensor, behind: int, valid: Tensor | None) -> Tensor:
    """(B, k - 1, D): what the next tokens will have behind them."""
    if valid is None:
        return line[:, line.shape[1] - behind :]
    ends = valid.sum(1, keepdim=True) + torch.arange(behind, device=line.device)  # (B, k - 1)
    return pick(line, ends)


def valid_first(layout: TokenLayout) -> Tensor | None:
    """(B, L) an order in which no invalid token stands between valid ones; None when all are valid."""
    return None if layout.valid is None else (~layout.valid).to(torch.uint8).argsort(dim=1, stable=True)


def pick(x: Tensor, order: Tensor | None) -> Tensor:
    """The tokens of each row in this order: x (B, L) or (B, L, D), order (B, M) or None for as they are."""
    if order is None:
        return x
    return x.gather(1, order if x.dim() == 2 else order.unsqueeze(-1).expand(-1, -1, x.shape[2]))
