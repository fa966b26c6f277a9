"""Grouped matrix product for the few tokens of a decode step: each chosen expert's matrix is read once.

    y_t = W_{e(t)} x_t          x is sorted by expert, the rows of expert e end at ends[e]

A program multiplies the rows of one expert by a tile of its matrix's outputs; programs of experts without rows end at
once. W is on the left of the tensor-core product because its tiles have at least 64 rows, and an expert has few tokens.
kernels/grouped_matmul.py is faster for many rows per expert.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_ROWS_PER_EXPERT = 16  # on average


@triton.jit
def multiply_rows_of_experts(
    x, weight, ends, out, outputs, columns,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    group, expert = tl.program_id(0), tl.program_id(1)
    begin = tl.load(ends + tl.maximum(expert - 1, 0)) * (expert > 0)
    end = tl.load(ends + expert)
    n, k = group * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    weight += expert.to(tl.int64) * outputs * columns
    for first in range(begin, end, BLOCK_M):
        m = first + tl.arange(0, BLOCK_M)
        y = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for start in range(0, columns, BLOCK_K):
            inside = start + k < columns
            tile = tl.load(
                weight + n[:, None] * columns + (start + k)[None, :],
                mask=(n < outputs)[:, None] & inside[None, :], other=0.0,
            )  # fmt: skip
            values = tl.load(
                x + m[None, :] * columns + (start + k)[:, None], mask=inside[:, None] & (m < end)[None, :], other=0.0
            )
            y = tl.dot(tile, values, y, input_precision="ieee")
        shown = (n < outputs)[:, None] & (m < end)[None, :]
        tl.store(out + m[None, :] * outputs + n[:, None], y.to(out.dtype.element_ty), mask=shown)


@torch.library.custom_op("regard::expert_linear", mutates_args=())
def expert_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x (T, I) sorted by expert, weight (X, O, I), ends (X,) with ends[-1] = T -> (T, O)"""
    experts, outputs, columns = weight.shape
    out = x.new_empty(len(x), outputs)
    tile, largest = 64, 512 // x.element_size()  # columns: four stages of float32 would need too much shared memory
    multiply_rows_of_experts[-(-outputs // tile), experts](
        x.contiguous(), weight, ends, out, outputs, columns,
        BLOCK_M=16, BLOCK_N=tile, BLOCK_K=min(largest, max(16, triton.next_power_of_2(columns))), num_warps=4,
        num_stages=4,
    )  # fmt: skip
    return out


@expert_linear.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(len(x), weight.shape[1])
