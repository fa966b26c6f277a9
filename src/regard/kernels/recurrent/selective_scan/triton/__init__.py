"""The selective scan by Triton kernels on CUDA GPUs (autograd.py, kernels.py): supported inputs and entry point."""

import torch
from torch import Tensor

from regard.compat import cannot_run_triton
from regard.kernels.recurrent.selective_scan.sequential import SelectiveScanInputs


def unsupported_reason(inputs: SelectiveScanInputs) -> str | None:
    missing = cannot_run_triton(inputs.u.device)
    if missing is not None:
        return f"triton {missing}"
    if inputs.state.dtype != torch.float32:
        return f"triton keeps the state in float32, not {str(inputs.state.dtype).removeprefix('torch.')}"
    state_dim = inputs.A.shape[1]
    if state_dim & (state_dim - 1) != 0:
        return f"triton takes a state_dim that is a power of two, not {state_dim}"
    return None


def selective_scan(inputs: SelectiveScanInputs) -> tuple[Tensor, Tensor]:
    from regard.kernels.recurrent.selective_scan.triton import autograd  # triton is optional

    return autograd.selective_scan(inputs)
