"""The linear recurrence of channels that do not meet: each token says how much stays and what is added.

    h_t = a_t ⊙ h_{t-1} + b_t

Joined as a tree, as Mamba's scan may be too (selective_scan/associative.py); a single token is a step. Here the states
are what is wanted, so the tree holds no more than the result.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.kernels.recurrent.selective_scan.associative import scan


def linear_recurrence(
    a: Tensor, b: Tensor, state: Tensor, segments: Tensor | None = None, valid: Tensor | None = None
) -> Tensor:
    """a, b (B, L, F), state (B, F) -> h (B, L, F) after every token.

    It begins anew where segments (B, L) change; tokens that are not valid (B, L) neither add nor fade.
    """
    if valid is not None:
        a, b = a.where(valid.unsqueeze(-1), 1.0), b.where(valid.unsqueeze(-1), 0.0)
    if segments is not None:
        begins = F.pad(segments[:, 1:] != segments[:, :-1], (1, 0))
        a = a.masked_fill(begins.unsqueeze(-1), 0.0)
    first = b[:, :1] + a[:, :1] * state.unsqueeze(1)
    return scan((a, torch.cat([first, b[:, 1:]], 1)))
