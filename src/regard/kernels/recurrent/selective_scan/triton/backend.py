"""The selective scan by Triton kernels on CUDA GPUs (autograd.py, kernels.py): supported arguments and entry point."""

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
    return None if size & (size - 1) == 0 else f"triton takes a state_dim that is a power of two, not {size}"


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
        selective_scan,  # triton is optional
    )

    return selective_scan(u, delta, A, B, C, D, state, segments, valid, bias)
