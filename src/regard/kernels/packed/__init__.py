"""Products with weights of 2 to 8 bits on a CPU, by C++ kernels that are compiled for it on first use."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from regard.kernels.attention.arguments import Pages
from regard.kernels.packed.build import load_library


@cache
def why_no_packed_kernel() -> str | None:
    """Compile and load the kernels; returns why that is impossible on this machine, or None."""
    reason = load_library()
    if reason is None:
        torch.library.register_fake("regard::packed_linear", empty_output)
    return reason


def empty_output(x: Tensor, packed: Tensor, outputs: int, layout: int, per_header: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], outputs))


def packed_linear(x: Tensor, packed: Tensor, outputs: int, layout: int, per_header: int) -> Tensor:
    """(…, inputs) in float32 -> (…, outputs). packed, per_header: of layouts.py; layout: its index in LAYOUTS."""
    return torch.ops.regard.packed_linear(x.contiguous(), packed, outputs, layout, per_header)


def decode_stack(
    x: Tensor, weights: Sequence[Tensor], packing: Sequence[int], pages: Sequence[Pages], cos: Tensor, sin: Tensor,
    positions: Tensor, valid: Tensor | None, heads: int, scale: float, eps: float,
) -> Tensor:  # fmt: skip
    """(B, L, D) in float32 -> (B, L, D) through all blocks of a stack of attention and SwiGLU, after their norms.

    weights: norm, q, k, v, o, norm, gate, up, down of every block. packing: outputs, layout, per_header of each of
    these matrices. pages: keys and values of every block, which the new ones are appended to. cos, sin:
    (B or 1, L, E / 2), or empty without rotation.
    """
    rows, length = x.shape[:2]
    table, page, pools = pages[0].table.contiguous(), pages[0].block, [p.pool for p in pages]
    cos, sin = (t.expand(rows, -1, -1).contiguous() if t.numel() else t for t in (cos, sin))
    y = torch.ops.regard.decode_stack(
        x.reshape(rows * length, -1), weights, packing, pools, cos, sin, table, positions.contiguous(),
        None if valid is None else valid.contiguous(), heads, page, scale, eps,
    )  # fmt: skip
    return y.view(x.shape)
