"""The gated recurrent unit: one state and two gates, r for resetting it and z for updating it.

    r, z = σ(W [x_t, h_{t-1}] + b)
    before:  n = tanh(W_x x_t + b + W_h (r ⊙ h_{t-1}))            Cho et al. 2014, Chung et al. 2014
    after:   n = tanh(W_x x_t + b + r ⊙ (W_h h_{t-1} + b_h))      cuDNN, torch.nn.GRU
    h_t = (1 - z) ⊙ h_{t-1} + z ⊙ n

z of torch.nn.GRU is 1 - z here, so its weights of z change their sign: σ(-a) = 1 - σ(a).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from regard.kernels.recurrent.cells import CellStates

Recur = Callable[[Tensor], Tensor]


def step(x: Tensor, h: Tensor, recur: Recur, renew: Recur, reset: str) -> CellStates:
    """x (B, 3N) is W_x x_t + b in the order r, z, n; `recur` returns W_h h of the two gates, `renew` that of n."""
    x_gates, x_n = x.tensor_split([2 * h.shape[-1]], -1)  # (B, 2N), (B, N)
    r, z = (x_gates + recur(h)).sigmoid().chunk(2, -1)  # (B, N)
    n = torch.tanh(x_n + (renew(r * h) if reset == "before" else r * renew(h)))
    return (torch.lerp(h, n.to(h.dtype), z.to(h.dtype)),)


def fused(
    x: Tensor, past: CellStates, w_x: Tensor, w_h: Tensor, w_n: Tensor, bias: Tensor | None, bias_n: Tensor | None,
    sizes: Tensor | None = None,
) -> tuple[Tensor, CellStates]:  # fmt: skip
    """For reset="after". x (B, L, D), or (T, D) packed by step, with the number of documents per step in `sizes`."""
    h = past[0]
    width = h.shape[1]
    signs = torch.ones_like(w_x[:, :1])
    signs[width : 2 * width] = -1  # z of torch is 1 - z
    weights = [w_x * signs, torch.cat([w_h, w_n]) * signs]
    if bias is not None:
        assert bias_n is not None
        weights += [bias * signs[:, 0], torch.cat([bias_n.new_zeros(2 * width), bias_n])]
    settings = (h.unsqueeze(0), weights, bias is not None, 1, 0.0, torch.is_grad_enabled(), False)
    outputs, h = torch.gru(x, *settings, True) if sizes is None else torch.gru(x, sizes, *settings)
    return outputs, (h[0],)
