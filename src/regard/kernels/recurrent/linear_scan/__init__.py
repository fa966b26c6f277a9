"""The linear scan: a matrix state that decays, is updated and is read at every token; several backends, one signature.

    S_t = diag(exp(log_decay_t)) S_{t-1} + k_t v_tᵀ          out_t = S_tᵀ q_t

    scan(ScanInputs(q, k, v, log_decay, state, segments, valid)) -> out (B, H, L, P), the state after the last token

q and k are (B, G, L, N) with G dividing H: the heads of a group share them. v is (B, H, L, P), the state (B, H, N, P).
Everything is computed in the dtype of the state, at least float32. `log_decay` is finite and at most 0:

    None            no decay                     linear attention             Katharopoulos et al. 2020
    (H,)            constant per head            retention                    Sun et al. 2023
    (B, H, L)       per token                    Mamba-2                      Dao & Gu 2024
    (B, H, L, N)    per token and key channel    gated linear attention       Yang et al. 2023

The state resets where `segments` (B, L) change; tokens that are not `valid` (B, L) read it but leave it unchanged.
`sequential` is the equation itself, and the other backends are tested against it. `unsupported_reason` returns the
reason why a backend does not support the inputs. `scan` runs the first backend that supports them; a single token
always runs as one step. `select_backend` returns the name of the backend and the reasons against the earlier ones.
"""

from collections.abc import Callable

from torch import Tensor

from regard.kernels.dispatch import checked_backend, first_suitable
from regard.kernels.recurrent.linear_scan import chunked, sequential, triton
from regard.kernels.recurrent.linear_scan.sequential import ScanInputs

ScanFunction = Callable[[ScanInputs], tuple[Tensor, Tensor]]
BACKENDS = {"triton": triton, "chunked": chunked, "sequential": sequential}


def select_backend(inputs: ScanInputs) -> tuple[str, str]:
    """The backend that `scan` runs, and the reasons against the backends before it."""
    if inputs.v.shape[2] == 1:
        return "sequential", "one token is one step"
    return first_suitable(BACKENDS, inputs)


def scan(inputs: ScanInputs) -> tuple[Tensor, Tensor]:
    return scan_with(select_backend(inputs)[0], inputs)


def scan_with(name: str, inputs: ScanInputs) -> tuple[Tensor, Tensor]:
    return BACKENDS[name].scan(inputs)


def backend(name: str) -> ScanFunction:
    """The scan of this name; it raises ValueError for inputs that the backend does not support."""
    return scan if name == "auto" else checked_backend("scan", name, BACKENDS, scan_with)


def flops(
    key_dim: int, value_dim: int, tokens: int, heads: int, groups: int | None = None, channels: bool = False
) -> int:
    """FLOPs of the matrix products of one scan on a CPU; `channels`: one decay per key channel."""
    if tokens == 1:
        return 4 * heads * key_dim * value_dim  # one update and one read of the state
    return chunked.flops(key_dim, value_dim, tokens, heads, groups or heads, channels)
