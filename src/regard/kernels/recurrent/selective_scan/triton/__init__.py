"""The selective scan by Triton kernels on CUDA GPUs (autograd.py, kernels.py): supported inputs and entry point."""

from torch import Tensor

from regard.kernels.recurrent import unsupported_state_reason
from regard.kernels.recurrent.selective_scan.sequential import SelectiveScanInputs


def unsupported_reason(inputs: SelectiveScanInputs) -> str | None:
    if reason := unsupported_state_reason(inputs.state):
        return reason
    state_dim = inputs.A.shape[1]
    if state_dim & (state_dim - 1) != 0:
        return f"triton takes a state_dim that is a power of two, not {state_dim}"
    return None


def selective_scan(inputs: SelectiveScanInputs) -> tuple[Tensor, Tensor]:
    from regard.kernels.recurrent.selective_scan.triton import autograd  # triton is optional

    return autograd.selective_scan(inputs)
