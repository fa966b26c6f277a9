"""The inputs of all backends of the selective scan in the dtype of the state, with Δ computed."""

import torch
import torch.nn.functional as F
from torch import Tensor


def prepared(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    dtype: torch.dtype,
    valid: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, ...]:
    """u, Δ, A, B, C."""
    u, delta, A, B, C = (x.to(dtype) for x in (u, delta, A, B, C))
    if bias is not None:
        delta = F.softplus(delta + bias)
    return u, delta if valid is None else delta * valid.unsqueeze(-1), A, B, C
