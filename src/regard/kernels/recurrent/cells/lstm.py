"""Long short-term memory: only gates change the cell, so that it can keep its content for many steps.

    i, f, o = σ(W [x_t, h_{t-1}] + b)      g = tanh(W_g [x_t, h_{t-1}] + b_g)
    c_t = f ⊙ c_{t-1} + i ⊙ g              h_t = o ⊙ tanh(c_t)

Hochreiter & Schmidhuber 1997; forget gate by Gers et al. 2000. Along the cell ∂c_T/∂c_t = Π f, without a matrix.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from regard.kernels.recurrent.cells import CellStates


def step(x: Tensor, h: Tensor, c: Tensor, recur: Callable[[Tensor], Tensor]) -> CellStates:
    """x (B, 4N) is W_x x_t + b, and `recur` returns W_h h, in the order i, f, g, o."""
    i, f, g, o = (x + recur(h)).chunk(4, -1)  # (B, N)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def fused(
    x: Tensor, past: CellStates, w_x: Tensor, w_h: Tensor, bias: Tensor | None, sizes: Tensor | None = None
) -> tuple[Tensor, CellStates]:
    """x (B, L, D), or (T, D) packed by step, with the number of documents per step in `sizes`."""
    biases = [] if bias is None else [bias, torch.zeros_like(bias)]
    h, c = (state.unsqueeze(0) for state in past)
    settings = ([h, c], [w_x, w_h, *biases], bias is not None, 1, 0.0, torch.is_grad_enabled(), False)
    outputs, h, c = torch.lstm(x, *settings, True) if sizes is None else torch.lstm(x, sizes, *settings)
    return outputs, (h[0], c[0])
