"""The selective scan token by token, as its equation: one step of decoding, and the reference for other backends."""

import torch
from torch import Tensor

from regard.kernels.recurrent.selective_scan.inputs import prepared


def refuses(*inputs: Tensor | None) -> str | None:
    return None


def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    state: Tensor,
    segments: Tensor | None = None,
    valid: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    u, delta, A, B, C = prepared(u, delta, A, B, C, state.dtype, valid, bias)
    ys = []
    for t in range(u.shape[1]):
        if segments is not None and t > 0:
            state = state * (segments[:, t] == segments[:, t - 1]).view(-1, 1, 1)
        decay = (delta[:, t].unsqueeze(-1) * A).exp()  # (B, F, N)
        new = (delta[:, t] * u[:, t]).unsqueeze(-1) * B[:, t].unsqueeze(1)
        state = decay * state + new
        ys.append((state * C[:, t].unsqueeze(1)).sum(-1))  # (B, F)
    y = torch.stack(ys, 1)  # (B, L, F)
    return y if D is None else y + D.to(y.dtype) * u, state
