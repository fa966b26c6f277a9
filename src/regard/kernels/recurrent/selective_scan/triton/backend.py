"""Mamba's scan by Triton's kernels (spans.py, passes.py), on CUDA GPUs: which cases they take, and the way to them."""

import torch
from torch import Tensor

from regard.compat import cannot_triton


def refuses(
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
) -> str | None:
    missing = cannot_triton(u.device)
    if missing is not None:
        return f"triton {missing}"
    if state.dtype != torch.float32:
        return f"triton keeps the state in float32, not {str(state.dtype).removeprefix('torch.')}"
    size = A.shape[1]
    return None if size & (size - 1) == 0 else f"triton takes states of 2^i numbers a channel, not {size}"


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
    from regard.kernels.recurrent.selective_scan.triton.autograd import (
        selective_scan,  # imports triton, which need not be installed
    )

    return selective_scan(u, delta, A, B, C, D, state, segments, valid, bias)
