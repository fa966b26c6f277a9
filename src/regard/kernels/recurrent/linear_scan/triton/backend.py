"""The linear scan by Triton kernels on CUDA GPUs (autograd.py, kernels.py): supported arguments and entry points."""

import torch
from torch import Tensor

from regard.compat import cannot_triton

SIZES = (
    64,
    128,
    256,
)  # for fewer than 64 rows Triton 3.6 uses other matrix instructions, which read outside of shared memory


def refuses(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    state: Tensor,
    segments: Tensor | None = None,
    valid: Tensor | None = None,
) -> str | None:
    missing = cannot_triton(v.device)
    if missing is not None:
        return f"triton {missing}"
    if state.dtype != torch.float32:
        return f"triton keeps the state in float32, not {str(state.dtype).removeprefix('torch.')}"
    if decay is not None and decay.dim() == 4:
        return "triton takes one decay per token and head, not per key channel"
    if q.shape[3] not in SIZES or v.shape[3] - v.shape[3] % 2 not in SIZES:
        sizes = f"{q.shape[3]} and {v.shape[3]}"
        return f"triton takes key and value dims of 64, 128 or 256, values also one more, not {sizes}"
    return None


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    state: Tensor,
    segments: Tensor | None = None,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    from regard.kernels.recurrent.linear_scan.triton.autograd import scan  # triton is optional

    return scan(q, k, v, decay, state, segments, valid)


def scan_with_total(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    state: Tensor,
    segments: Tensor | None = None,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The scan of v (B, H, L, P), and separately of a column of ones (B, H, L, 1); the state is (B, H, N, P + 1)."""
    from regard.kernels.recurrent.linear_scan.triton.autograd import scan_with_total

    return scan_with_total(q, k, v, decay, state, segments, valid)
