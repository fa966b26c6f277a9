"""The inputs of the linear scan, and the scan computed token by token, as in its equation.

This backend runs the single steps of decoding, and it is the reference for the other backends.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from regard.kernels.autocast import without_autocast


class ScanInputs(NamedTuple):
    """The inputs of all backends; the heads of a group share q and k."""

    q: Tensor  # (B, G, L, N)
    k: Tensor  # (B, G, L, N)
    v: Tensor  # (B, H, L, P)
    log_decay: Tensor | None  # (H,), (B, H, L) or (B, H, L, N)
    state: Tensor  # (B, H, N, P)
    segments: Tensor | None = None  # (B, L)
    valid: Tensor | None = None  # (B, L)


def unsupported_reason(inputs: ScanInputs) -> str | None:
    return None


def scan(inputs: ScanInputs) -> tuple[Tensor, Tensor]:
    q, k, v, log_decay, state, segments, valid = inputs
    q, k, v = (per_head(x, v).to(state.dtype) for x in (q, k, v))  # (B, H, L, …)
    outs = []
    with without_autocast(q.device):
        for t in range(v.shape[2]):
            if segments is not None and t > 0:
                state = state * (segments[:, t] == segments[:, t - 1]).view(-1, 1, 1, 1)
            decayed = state if log_decay is None else state * at_token(log_decay, t).to(state.dtype).exp()
            new = decayed + k[:, :, t].unsqueeze(-1) @ v[:, :, t].unsqueeze(-2)  # (B, H, N, P)
            state = new if valid is None else new.where(valid[:, t].view(-1, 1, 1, 1), state)
            outs.append(q[:, :, t].unsqueeze(-2) @ state)  # (B, H, 1, P)
    return torch.cat(outs, 2), state


def at_token(log_decay: Tensor, t: int) -> Tensor:
    """The log decays of token t: (1, H, 1, 1), (B, H, 1, 1) or (B, H, N, 1)."""
    current = log_decay.unsqueeze(0) if log_decay.dim() == 1 else log_decay[:, :, t]
    return current.reshape(*current.shape[:2], -1, 1)


def per_head(x: Tensor, v: Tensor) -> Tensor:
    """Repeat the tensors of each group for its heads: (B, G, …) -> (B, H, …)."""
    return x if x.shape[1] == v.shape[1] else x.repeat_interleave(v.shape[1] // x.shape[1], 1)
