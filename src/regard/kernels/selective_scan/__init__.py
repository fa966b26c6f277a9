"""Mamba's scan: every channel keeps N numbers that fade and are written as each token says; by several backends.

    h_t = exp(Δ_t A) ⊙ h_{t-1} + Δ_t B_t u_t          y_t = C_t · h_t + D u_t

    selective_scan(u, delta, A, B, C, D, state, segments, valid) -> y (B, L, F), the state after the last token

u and Δ > 0 are (B, L, F); A < 0 is (F, N); B and C are (B, L, N), the same for all channels; D is (F,) or None. The
state is (B, F, N) in float32 at least, which everything is computed in. It begins anew where `segments` (B, L) change;
tokens that are not `valid` (B, L) read, but neither write nor fade: their Δ is 0. Gu & Dao 2023.

`sequential` is the equation and the oracle of the others. A backend says which cases it does not take (`refuses`);
`selective_scan` takes the first of the table that refuses nothing, one token always by its step, and `why` tells which.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from regard.kernels.selective_scan import associative, chunked, sequential, triton
from regard.spec import nearest

Scan = Callable[..., tuple[Tensor, Tensor]]
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
) -> tuple[str, str]:
    """The backend that `selective_scan` takes for this case, and why those before it were passed over."""
    if u.shape[1] == 1:
        return "sequential", "one token is one step"
    passed = []
    for name, module in BACKENDS.items():
        reason = module.refuses(u, delta, A, B, C, D, state, segments, valid)
        if reason is None:
            return name, "; ".join(passed) or f"{name} is the fastest and takes this case"
        passed.append(reason)
    raise AssertionError("sequential takes every case")


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
) -> tuple[Tensor, Tensor]:
    case = (u, delta, A, B, C, D, state, segments, valid)
    return BACKENDS[why(*case)[0]].selective_scan(*case)


def backend(name: str) -> Scan:
    """The scan of that name, which raises ValueError for a case that it does not take."""
    if name == "auto":
        return selective_scan
    if name not in BACKENDS:
        raise ValueError(f"there is no selective scan backend {name!r}; {nearest(name, ['auto', *BACKENDS])}")
    module = BACKENDS[name]

    def chosen(*case: Any) -> tuple[Tensor, Tensor]:
        reason = module.refuses(*case)
        if reason is not None:
            raise ValueError(f"selective scan backend {name!r}: {reason}; choose another, or auto")
        return module.selective_scan(*case)

    chosen.__name__ = name
    return chosen


def flops(channels: int, state: int, tokens: int) -> int:
    """Of the matrix products of one scan as a CPU takes it: the reading, C_t · h_t. The recurrence itself has none."""
    return 0 if tokens == 1 else 2 * tokens * channels * state
