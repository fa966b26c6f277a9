"""A linear layer whose result for a token is bitwise the same whatever other tokens are computed with it.

    y = residual + W n,    y = σ(W₁ n) ⊙ W₂ n        n = x, or RMSNorm(x), as in triton_decode_linear.py

Sums of floats depend on their order, so for each output all kernels here add the same products in the same order: the
columns of W are divided into chunks, which depend on the shape of W only; within a chunk a tensor core adds 16 columns
at a time, in order; then the sums of the chunks are added in order. Two kernels differ in who does that. Up to
MAX_TOKENS tokens, programs share the chunks (multiply_rows); for more, one program computes all chunks of its tile.
He et al. 2025, "Defeating nondeterminism in LLM inference".
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from regard.kernels.triton_decode_linear import (
    MAX_TOKENS,
    Tiles,
    choose_tiles,
    finish,
    launch_rows,
    multiprocessors,
    next_power_of_2,
    normalize,
)

TILES = ((128, 128), (128, 64), (64, 64), (32, 64))  # tokens and outputs
BLOCK_K = 64  # columns per tile of many tokens; it divides every chunk
TOKEN_GROUP = tl.constexpr(8)  # tiles of tokens that are computed one after another with the same rows of W, in L2
# A compiler that contracts a · b + c to one rounding may do so in one kernel and not in the other.
EXACT: dict[str, Any] = {"enable_fp_fusion": False}


@triton.jit
def multiply_chunk(
    x, weight, token, row, outputs, begin, end,
    ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Products of some columns, transposed, (N, M), with the rows of W from `row` on, and with those of W₂."""
    y = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    second = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(begin, end, BLOCK_K):
        values = x.load([token, start]).T  # (K, M)
        y = tl.dot(weight.load([row, start]), values, y, input_precision="ieee")
        if ACTIVATION is not None:
            second = tl.dot(weight.load([outputs + row, start]), values, second, input_precision="ieee")
    return y, second


@triton.jit
def multiply_many_rows(
    x, weight, bias, residual, out, tokens, outputs, columns,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """A tile of tokens and outputs. x, weight: descriptors, which read zeros past the ends."""
    groups, blocks = tl.cdiv(outputs, BLOCK_N), tl.cdiv(tokens, BLOCK_M)
    program, together = tl.program_id(0), TOKEN_GROUP * groups
    first = program // together * TOKEN_GROUP
    size = tl.minimum(blocks - first, TOKEN_GROUP)
    token = (first + program % together % size) * BLOCK_M
    row = program % together // size * BLOCK_N
    if CHUNKS == 1:
        y, second = multiply_chunk(
            x, weight, token, row, outputs, 0, columns, ACTIVATION, BLOCK_M, BLOCK_N, BLOCK_K
        )  # fmt: skip
    else:
        y = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        second = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for begin in range(0, CHUNK * CHUNKS, CHUNK):
            part, second_part = multiply_chunk(
                x, weight, token, row, outputs, begin, tl.minimum(begin + CHUNK, columns),
                ACTIVATION, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            y += part
            second += second_part
    n, m = row + tl.arange(0, BLOCK_N), token + tl.arange(0, BLOCK_M)
    exists, is_token = (n < outputs)[:, None], (m < tokens)[None, :]
    cell = m[None, :].to(tl.int64) * outputs + n[:, None]
    finish(
        y, second, n[:, None], cell, bias, residual, outputs, exists, exists & is_token, out,
        BIAS, RESIDUAL, ACTIVATION,
    )  # fmt: skip


def invariant_linear(
    x: Tensor,  # (tokens, D)
    weight: Tensor,  # (outputs, D), or (2 · outputs, D) with an activation
    norm: Tensor | None = None,  # (D,) weight of the RMSNorm of x
    eps: float = 0.0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,  # (tokens, outputs)
    activation: str | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """(tokens, outputs). tiles: their `columns` and `splits` set the order of the sums; None: by the weight's shape."""
    tokens, columns = x.shape
    outputs = len(weight) if activation is None else len(weight) // 2
    out = x.new_empty(tokens, outputs)
    if tokens == 0:
        return out
    if norm is not None:
        x = invariant_norm(x, norm, eps)
    processors = multiprocessors(x.device)
    tiles = tiles or choose_tiles(2, outputs, columns, activation is not None, processors)  # the same from 2 tokens on
    options = {"BIAS": bias is not None, "RESIDUAL": residual is not None, "ACTIVATION": activation} | EXACT
    if tokens > MAX_TOKENS:
        block_m, block_n = many_rows_tile(tokens, outputs, processors)
        multiply_many_rows[(-(-outputs // block_n) * -(-tokens // block_m),)](
            TensorDescriptor.from_tensor(x, [block_m, BLOCK_K]),
            TensorDescriptor.from_tensor(weight, [block_n, BLOCK_K]),
            bias, residual, out, tokens, outputs, columns, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=BLOCK_K,
            CHUNK=chunk_columns(columns, tiles), CHUNKS=tiles.splits,
            num_warps=block_n // 16, num_stages=4, **options,
        )  # fmt: skip
        return out
    launch_rows(x, weight, bias, residual, out, tiles, options)
    return out


def invariant_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of (tokens, D), one program per token."""
    out, block = torch.empty_like(x), next_power_of_2(x.shape[1])
    if len(x):
        warps = min(max(block // 1024, 1), 16)
        normalize[(len(x),)](x, weight, out, x.shape[1], eps, BLOCK_K=block, num_warps=warps, **EXACT)
    return out


def chunk_columns(columns: int, tiles: Tiles) -> int:
    """The columns that one program of multiply_rows sums."""
    return triton.cdiv(triton.cdiv(columns, tiles.columns), tiles.splits) * tiles.columns


def many_rows_tile(tokens: int, outputs: int, processors: int) -> tuple[int, int]:
    """Tokens and outputs per tile: as large as leaves most multiprocessors a tile. They do not change the sums."""
    for block_m, block_n in TILES:
        if 4 * -(-outputs // block_n) * -(-tokens // block_m) >= 3 * processors:
            return block_m, block_n
    return TILES[-1]
