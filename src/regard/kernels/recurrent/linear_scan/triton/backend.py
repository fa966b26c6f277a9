"""The scan by Triton's kernels (spans.py, passes.py), on CUDA GPUs: which cases they take, and the way to them."""

import torch
from torch import Tensor

from regard.compat import cannot_triton

SIZES = (64, 128, 256)  # below 64 rows Triton 3.6 takes other matrix instructions, and reads outside of shared memory


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
        return "triton takes one decay a token and head, not one a key channel"
    if q.shape[3] not in SIZES or v.shape[3] - v.shape[3] % 2 not in SIZES:
        sizes = f"{q.shape[3]} and {v.shape[3]}"
        return f"triton takes keys and values of 64, 128 or 256, values also of one more, not {sizes}"
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
    from regard.kernels.recurrent.linear_scan.triton.autograd import scan  # imports triton, which need not be installed

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
    """The scan of v (B, H, L, P) and, apart, of a column of ones (B, H, L, 1); the state is (B, H, N, P + 1)."""
    from regard.kernels.recurrent.linear_scan.triton.autograd import scan_with_total

    return scan_with_total(q, k, v, decay, state, segments, valid)
