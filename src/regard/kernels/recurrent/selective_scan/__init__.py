"""The selective scan of Mamba: every channel has a state of N numbers with data-dependent decay and input.

    h_t = exp(Δ_t A) ⊙ h_{t-1} + Δ_t B_t u_t          y_t = C_t · h_t + D u_t

    selective_scan(SelectiveScanInputs(u, delta, A, B, C, D, state, segments, valid, bias))
        -> y (B, L, F), the state after the last token

u and Δ > 0 are (B, L, F); A < 0 is (F, N); B and C are (B, L, N), shared by all channels; D is (F,) or None. The state
is (B, F, N), and everything is computed in its dtype, at least float32. It resets where `segments` (B, L) change;
tokens that are not `valid` (B, L) have Δ = 0, so they leave it unchanged. With a `bias` (F,), Δ = softplus(delta +
bias), which the GPU kernels fuse. Gu & Dao 2023.

`sequential` is the equation itself, and the other backends are tested against it. `unsupported_reason` returns the
reason why a backend does not support the inputs. `selective_scan` runs the first backend that supports them; a single
token always runs as one step. `select_backend` returns the name of the backend and the reasons against the earlier
ones.
"""

from collections.abc import Callable

from torch import Tensor

from regard.kernels.dispatch import checked_backend, first_suitable
from regard.kernels.recurrent.selective_scan import associative, chunked, sequential, triton
from regard.kernels.recurrent.selective_scan.sequential import SelectiveScanInputs

SelectiveScanFunction = Callable[[SelectiveScanInputs], tuple[Tensor, Tensor]]
BACKENDS = {"triton": triton, "chunked": chunked, "associative": associative, "sequential": sequential}


def select_backend(inputs: SelectiveScanInputs) -> tuple[str, str]:
    """The backend that `selective_scan` runs, and the reasons against the backends before it."""
    if inputs.u.shape[1] == 1:
        return "sequential", "one token is one step"
    return first_suitable(BACKENDS, inputs)


def selective_scan(inputs: SelectiveScanInputs) -> tuple[Tensor, Tensor]:
    return scan_with(select_backend(inputs)[0], inputs)


def scan_with(name: str, inputs: SelectiveScanInputs) -> tuple[Tensor, Tensor]:
    return BACKENDS[name].selective_scan(inputs)


def backend(name: str) -> SelectiveScanFunction:
    """The scan of this name; it raises ValueError for inputs that the backend does not support."""
    return selective_scan if name == "auto" else checked_backend("selective scan", name, BACKENDS, scan_with)


def flops(channels: int, state: int, tokens: int) -> int:
    """FLOPs of the matrix products of one scan on a CPU: those of C_t · h_t. The recurrence itself has none."""
    return 0 if tokens == 1 else 2 * tokens * channels * state
