"""The linear scan by Triton kernels on CUDA GPUs (autograd.py, kernels.py): supported inputs and entry points."""

from torch import Tensor

from regard.kernels.recurrent import unsupported_state_reason
from regard.kernels.recurrent.linear_scan.sequential import ScanInputs

# For fewer than 64 rows Triton 3.6 uses other matrix instructions, which read outside of shared memory.
SIZES = (64, 128, 256)


def unsupported_reason(inputs: ScanInputs) -> str | None:
    if reason := unsupported_state_reason(inputs.state):
        return reason
    if inputs.log_decay is not None and inputs.log_decay.dim() == 4:
        return "triton takes one decay per token and head, not per key channel"
    key_dim, value_dim = inputs.q.shape[3], inputs.v.shape[3]
    if key_dim not in SIZES or value_dim - value_dim % 2 not in SIZES:
        return f"triton takes key dims of 64, 128 or 256, value dims also one larger, not {key_dim} and {value_dim}"
    return None


def scan(inputs: ScanInputs) -> tuple[Tensor, Tensor]:
    from regard.kernels.recurrent.linear_scan.triton import autograd  # triton is optional

    return autograd.scan(inputs)


def scan_with_total(inputs: ScanInputs) -> tuple[Tensor, Tensor, Tensor]:
    """The outputs of v (B, H, L, P) and of a column of ones (B, H, L, 1), and the state (B, H, N, P + 1) of both."""
    from regard.kernels.recurrent.linear_scan.triton import autograd

    return autograd.scan_with_total(inputs)
