"""The short causal convolution per channel of recurrent mixers.

    y_t = Σ_{i<k} w_i ⊙ x_{t-i} (+ bias)          over valid tokens of the same document

On a CPU it is a sum of shifted copies: for a few taps that is as fast as a grouped convolution, and memory is read in
order. On a GPU it is one kernel (triton_convolution.py). Invalid tokens are sorted to the end first, so padding may be
anywhere. The tail holds the last k - 1 inputs of the previous tokens, zeros at the start of a sequence.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.compat import cannot_run_triton
from regard.layout import TokenLayout

MAX_TAPS = 8  # the kernel unrolls them


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, tail: Tensor, layout: TokenLayout
) -> tuple[Tensor, Tensor]:
    """x (B, L, D), weight (k, D), tail (B, k - 1, D) -> y (B, L, D) and the next tail.

    weight[0] is the tap of the current token.
    """
    order = layout.derived(order_valid_first)
    segments = None if layout.segments is None else gather_tokens(layout.segments, order)
    dtype, tail_length = torch.promote_types(x.dtype, weight.dtype), len(weight) - 1
    x, tail = gather_tokens(x, order).to(dtype), tail.to(dtype)
    if can_fuse(x, weight):
        y = convolve_with_triton(x, weight, bias, tail, segments)
        extended = torch.cat([tail, x if layout.valid is not None else x[:, max(x.shape[1] - tail_length, 0) :]], 1)
    else:
        extended = torch.cat([tail, x], 1)  # (B, k - 1 + L, D)
        y = sum_shifted(extended, weight, bias, segments)
    y = y if order is None else gather_tokens(y, order.argsort(1))  # the original order
    return y, next_tail(extended, tail_length, layout.valid)


def can_fuse(x: Tensor, weight: Tensor) -> bool:
    return (
        cannot_run_triton(x.device) is None and x.dtype != torch.float64 and x.shape[1] > 1 and len(weight) <= MAX_TAPS
    )


def convolve_with_triton(
    x: Tensor, weight: Tensor, bias: Tensor | None, tail: Tensor, segments: Tensor | None
) -> Tensor:
    from regard.kernels.triton_convolution import convolve  # triton is optional

    return convolve(x, weight, bias, tail, segments)


def sum_shifted(extended: Tensor, weight: Tensor, bias: Tensor | None, segments: Tensor | None) -> Tensor:
    tail_length = len(weight) - 1
    length = extended.shape[1] - tail_length
    y = extended[:, tail_length:] * weight[0]
    for i, tap in enumerate(weight[1:], 1):
        earlier = extended[:, tail_length - i : tail_length - i + length]  # (B, L, D)
        if segments is not None:
            same_document = segments == F.pad(segments, (i, 0))[:, :length]
            earlier = earlier.where(same_document.unsqueeze(-1), 0.0)
        y.addcmul_(earlier, tap)
    return y if bias is None else y.add_(bias)


def next_tail(extended: Tensor, tail_length: int, valid: Tensor | None) -> Tensor:
    """(B, k - 1, D): the tail for the next tokens."""
    if valid is None:
        return extended[:, extended.shape[1] - tail_length :]
    ends = valid.sum(1, keepdim=True) + torch.arange(tail_length, device=extended.device)  # (B, k - 1)
    return gather_tokens(extended, ends)


def order_valid_first(layout: TokenLayout) -> Tensor | None:
    """(B, L) an order with all valid tokens first; None if all are valid."""
    return None if layout.valid is None else (~layout.valid).to(torch.uint8).argsort(dim=1, stable=True)


def gather_tokens(x: Tensor, order: Tensor | None) -> Tensor:
    """The tokens of each row in this order: x (B, L) or (B, L, D), order (B, M); None: unchanged."""
    if order is None:
        return x
    return x.gather(1, order if x.dim() == 2 else order.unsqueeze(-1).expand(-1, -1, x.shape[2]))
