"""Products with weights of 2 to 8 bits on a CPU, by a C++ kernel that is compiled for it on first use."""

from functools import cache

import torch
from torch import Tensor

from regard.kernels.packed.build import load_library


@cache
def why_no_packed_kernel() -> str | None:
    """Compile and load the kernel; returns why that is impossible on this machine, or None."""
    reason = load_library()
    if reason is None:
        torch.library.register_fake("regard::packed_linear", empty_output)
    return reason


def empty_output(x: Tensor, packed: Tensor, outputs: int, layout: int, per_header: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], outputs))


def packed_linear(x: Tensor, packed: Tensor, outputs: int, layout: int, per_header: int) -> Tensor:
    """(…, inputs) in float32 -> (…, outputs). packed, per_header: of layouts.py; layout: its index in LAYOUTS."""
    return torch.ops.regard.packed_linear(x.contiguous(), packed, outputs, layout, per_header)
