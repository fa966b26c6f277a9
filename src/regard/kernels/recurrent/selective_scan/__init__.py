"""Mamba's scan: every channel keeps N numbers that fade and are written as each token says; by several backends.

    h_t = exp(Δ_t A) ⊙ h_{t-1} + Δ_t B_t u_t          y_t = C_t · h_t + D u_t

    selective_scan(u, delta, A, B, C, D, state, segments, valid, bias) -> y (B, L, F), the state after the last token

u and Δ > 0 are (B, L, F); A < 0 is (F, N); B and C are (B, L, N), the same for all channels; D is (F,) or None. The
state is (B, F, N) in float32 at least, which everything is computed in. It begins anew where `segments` (B, L) change;
tokens that are not `valid` (B, L) read, but neither write nor fade: their Δ is 0. With a `bias` (F,), `delta` is any
number and Δ = softplus(delta + bias), which the GPU's kernels make on the way. Gu & Dao 2023.

`sequential` is the equation and the oracle of the others. A backend says which cases it does not take (`refuses`);
`selective_scan` takes the first of the table that refuses nothing, one token always by its step, and `why` tells which.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from regard.kernels.dispatch import checked_backend, first_suitable
from regard.kernels.recurrent.selective_scan import associative, chunked, sequential
from regard.kernels.recurrent.selective_scan.triton import backend as triton

SelectiveScanFunction = Callable[..., tuple[Tensor, Tensor]]
BACKENDS = {"triton": triton, "chunked": chunked, "associative": associative, "sequential": sequential}


def why(
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
) -> tuple[str, str]:
    """The backend that `selective_scan` takes for this case, and why those before it were passed over."""
    if u.shape[1] == 1:
        return "sequential", "one token is one step"
    return first_suitable(BACKENDS, u, delta, A, B, C, D, state, segments, valid, bias)


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
    case = (u, delta, A, B, C, D, state, segments, valid, bias)
    return scan_by(why(*case)[0], *case)


def scan_by(name: str, *case: Any) -> tuple[Tensor, Tensor]:
    return BACKENDS[name].selective_scan(*case)


def backend(name: str) -> SelectiveScanFunction:
    """The scan of that name, which raises ValueError for a case that it does not take."""
    return selective_scan if name == "auto" else checked_backend("selective scan", name, BACKENDS, scan_by)


def flops(channels: int, state: int, tokens: int) -> int:
    """Of the matrix products of one scan as a CPU takes it: the reading, C_t · h_t. The recurrence itself has none."""
    return 0 if tokens == 1 else 2 * tokens * channels * state
