"""The selective scan as a parallel prefix scan (linear_recurrence.py) of the steps h → a h + b, one per token:

    a_t = exp(Δ_t A)          b_t = Δ_t B_t u_t

It stores every state, L · F · N numbers per round, so on a CPU it is slower than chunked.py; it is plain tensor algebra
that autograd differentiates.
"""

import torch
from torch import Tensor

from regard.kernels.recurrent.linear_recurrence import associative_scan
from regard.kernels.recurrent.selective_scan.sequential import SelectiveScanInputs


def unsupported_reason(inputs: SelectiveScanInputs) -> str | None:
    return None


def selective_scan(inputs: SelectiveScanInputs) -> tuple[Tensor, Tensor]:
    u, delta, A, B, C = inputs.in_state_dtype()
    D, state, segments = inputs.D, inputs.state, inputs.segments
    a = (delta.unsqueeze(-1) * A).exp()  # (B, L, F, N)
    b = (delta * u).unsqueeze(-1) * B.unsqueeze(2)
    if segments is not None:
        resets = segments[:, 1:] != segments[:, :-1]
        a = torch.cat([a[:, :1], a[:, 1:].masked_fill(resets[..., None, None], 0.0)], 1)
    a = torch.cat([torch.ones_like(a[:, :1]), a], 1)  # the initial state is a first token
    b = torch.cat([state.unsqueeze(1), b], 1)
    h = associative_scan((a, b))[:, 1:]  # (B, L, F, N)
    y = (h * C.unsqueeze(2)).sum(-1)  # (B, L, F)
    return y if D is None else y + D.to(y.dtype) * u, h[:, -1]
