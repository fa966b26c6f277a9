"""The simple recurrent network of Elman 1990.

    h_t = tanh(W_x x_t + W_h h_{t-1} + b)

The gradient from step T to step t is a product of T - t factors diag(1 - h²) W_h, so it shrinks or grows exponentially.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from regard.kernels.recurrent.cells import CellStates

ACTIVATIONS = {"tanh": torch.tanh, "relu": torch.relu}
FUSED = {"tanh": torch.rnn_tanh, "relu": torch.rnn_relu}


def step(x: Tensor, h: Tensor, recur: Callable[[Tensor], Tensor], activation: str = "tanh") -> CellStates:
    """x (B, N) is W_x x_t + b, and `recur` returns W_h h."""
    return (ACTIVATIONS[activation](x + recur(h)),)


def fused(
    x: Tensor, past: CellStates, w_x: Tensor, w_h: Tensor, bias: Tensor | None, sizes: Tensor | None = None,
    activation: str = "tanh",
) -> tuple[Tensor, CellStates]:  # fmt: skip
    """x (B, L, D), or (T, D) packed by step, with the number of documents per step in `sizes`."""
    biases = [] if bias is None else [bias, torch.zeros_like(bias)]
    settings = (past[0].unsqueeze(0), [w_x, w_h, *biases], bias is not None, 1, 0.0, torch.is_grad_enabled(), False)
    run = FUSED[activation]
    outputs, h = run(x, *settings, True) if sizes is None else run(x, sizes, *settings)
    return outputs, (h[0],)
