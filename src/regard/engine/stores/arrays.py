"""Arrays whose memory is used as it is written.

`torch.zeros` on a CPU writes its zeros, so all of the memory is used at once. These come from `calloc`: the operating
system gives a page when it is first written, so a pool for many long sequences costs little while it is empty, and its
address never changes.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 64  # bytes, as torch aligns its own


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    if torch.device(device).type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + ALIGNMENT, dtype=np.uint8)  # as bytes: NumPy has no bfloat16
    start = -memory.ctypes.data % ALIGNMENT
    return torch.from_numpy(memory[start : start + size]).view(dtype).view(*shape)
