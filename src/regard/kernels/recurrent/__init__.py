"""Recurrences over tokens: linear and selective scans, state-space models, RWKV, and cells such as the LSTM."""

from torch import Tensor

from regard.compat import cannot_run_triton


def unsupported_state_reason(state: Tensor) -> str | None:
    """The reason why the Triton kernels of the scans cannot run with this state, or None."""
    if reason := cannot_run_triton(state.device):
        return f"triton {reason}"
    dtype = str(state.dtype).removeprefix("torch.")
    return None if dtype == "float32" else f"triton keeps the state in float32, not {dtype}"
