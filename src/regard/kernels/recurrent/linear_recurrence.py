"""The elementwise linear recurrence: each channel has its own decay and input at every token.

    h_t = a_t ⊙ h_{t-1} + b_t

It is computed by the associative scan of selective_scan/associative.py, which stores all states; here they are the
result.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.kernels.recurrent.selective_scan.associative import associative_scan


def linear_recurrence(
    a: Tensor, b: Tensor, state: Tensor, segments: Tensor | None = None, valid: Tensor | None = None
) -> Tensor:
    """a, b (B, L, F), state (B, F) -> h (B, L, F) after every token.

    The state resets where segments (B, L) change; invalid tokens (B, L) leave it unchanged.
    """
    if valid is not None:
        a, b = a.where(valid.unsqueeze(-1), 1.0), b.where(valid.unsqueeze(-1), 0.0)
    if segments is not None:
        resets = F.pad(segments[:, 1:] != segments[:, :-1], (1, 0))
        a = a.masked_fill(resets.unsqueeze(-1), 0.0)
    first = b[:, :1] + a[:, :1] * state.unsqueeze(1)
    return associative_scan((a, torch.cat([first, b[:, 1:]], 1)))
