"""The inputs of the selective scan, and the scan token by token, as its equation.

This backend runs the single steps of decoding, and it is the reference for the other backends.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class SelectiveScanInputs(NamedTuple):
    """The inputs of all backends; with a bias, Δ = softplus(delta + bias)."""

    u: Tensor  # (B, L, F)
    delta: Tensor  # (B, L, F)
    A: Tensor  # (F, N)
    B: Tensor  # (B, L, N)
    C: Tensor  # (B, L, N)
    D: Tensor | None  # (F,)
    state: Tensor  # (B, F, N)
    segments: Tensor | None = None  # (B, L)
    valid: Tensor | None = None  # (B, L)
    bias: Tensor | None = None  # (F,)

    def in_state_dtype(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """u, Δ, A, B and C in the dtype of the state; Δ is 0 for invalid tokens."""
        u, delta, A, B, C = (x.to(self.state.dtype) for x in (self.u, self.delta, self.A, self.B, self.C))
        if self.bias is not None:
            delta = F.softplus(delta + self.bias)
        return u, delta if self.valid is None else delta * self.valid.unsqueeze(-1), A, B, C


def unsupported_reason(inputs: SelectiveScanInputs) -> str | None:
    return None


def selective_scan(inputs: SelectiveScanInputs) -> tuple[Tensor, Tensor]:
    u, delta, A, B, C = inputs.in_state_dtype()
    D, state, segments = inputs.D, inputs.state, inputs.segments
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
