"""The scan: a matrix of memory that fades, is added to and read at every token; by several backends of one signature.

    S_t = diag(exp(decay_t)) S_{t-1} + k_t v_tᵀ          out_t = S_tᵀ q_t

    scan(q, k, v, decay, state, segments, valid) -> out (B, H, L, P), the state after the last token

q and k are (B, G, L, N) with G dividing H: heads of a group share them. v is (B, H, L, P), the state (B, H, N, P) in
float32 at least, which everything is computed in. `decay` holds logarithms, finite and at most 0:

    None            nothing fades                linear attention             Katharopoulos et al. 2020
    (H,)            a constant a head            retention                    Sun et al. 2023
    (B, H, L)       one a token                  Mamba-2                      Dao & Gu 2024
    (B, H, L, N)    one a token and key channel  gated linear attention       Yang et al. 2023

The state begins anew where `segments` (B, L) change; tokens that are not `valid` (B, L) read, but neither add nor fade.
`recurrent` is the equation and the oracle of the others. A backend says which cases it does not take (`refuses`);
`scan` takes the first of the table that refuses nothing, one token always by its step, and `why` tells which and why.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from regard.kernels.dispatch import checked_backend, first_suitable
from regard.kernels.recurrent.linear_scan import chunked, sequential
from regard.kernels.recurrent.linear_scan.triton import backend as triton

ScanFunction = Callable[..., tuple[Tensor, Tensor]]
BACKENDS = {"triton": triton, "chunked": chunked, "sequential": sequential}


def why(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, state: Tensor, segments: Tensor | None, valid: Tensor | None
) -> tuple[str, str]:
    """The backend that `scan` takes for this case, and why those before it were passed over."""
    if v.shape[2] == 1:
        return "sequential", "one token is one step"
    return first_suitable(BACKENDS, q, k, v, decay, state, segments, valid)


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    state: Tensor,
    segments: Tensor | None = None,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    case = (q, k, v, decay, state, segments, valid)
    return scan_by(why(*case)[0], *case)


def scan_by(name: str, *case: Any) -> tuple[Tensor, Tensor]:
    return BACKENDS[name].scan(*case)


def backend(name: str) -> ScanFunction:
    """The scan of that name, which raises ValueError for a case that it does not take."""
    return scan if name == "auto" else checked_backend("scan", name, BACKENDS, scan_by)


def flops(
    key_dim: int, value_dim: int, tokens: int, heads: int, groups: int | None = None, channels: bool = False
) -> int:
    """Of the matrix products of one scan as a CPU takes it; `channels`: decays differ by key channel."""
    if tokens == 1:
        return 4 * heads * key_dim * value_dim  # the state is added to once and read once
    return chunked.flops(key_dim, value_dim, tokens, heads, groups or heads, channels)
