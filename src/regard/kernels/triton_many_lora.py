"""The low-rank products of many adapters (many_lora.py) in two kernels, one for A and one for B.

A program has a tile of tokens. It multiplies the tile by the matrix of every adapter that occurs in it, and keeps the
products of the tokens that have this adapter. So tokens need no sorting, every matrix is read once per tile, and the
kernels' sizes do not depend on the index, which may change between two runs of a CUDA graph. In a decode step one tile
has all tokens: programs share its adapters (`lanes`) and the columns of A (`splits`), whose sums B's kernel adds in a
fixed order.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class LoraTiles(NamedTuple):
    tokens: int
    columns: int  # of A
    outputs: int  # rows of B
    lanes: int  # programs that share the adapters of a tile
    splits: int  # programs that share the columns of A


@triton.jit
def adapters_of(index, t, tokens, length):
    """The adapter of each token of a tile, and the smallest and largest of them; -1: none."""
    adapter = tl.load(index + t // length, mask=t < tokens, other=-1)
    largest = tl.max(adapter, 0)
    smallest = tl.min(tl.where(adapter < 0, 1 << 30, adapter), 0)
    return adapter, smallest, largest


@triton.jit
def multiply_a(
    x, a, index, out, tokens, length, columns, rank,
    RANK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, LANES: tl.constexpr, SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out[split] = the part of x Aᵀ of these columns: (SPLITS, tokens, RANK), only tokens with an adapter."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    split, lane = tl.program_id(1), tl.program_id(2)
    r, k = tl.arange(0, RANK), tl.arange(0, BLOCK_K)
    adapter, smallest, largest = adapters_of(index, t, tokens, length)
    per_split = tl.cdiv(tl.cdiv(columns, BLOCK_K), SPLITS) * BLOCK_K
    first = split * per_split
    end = tl.minimum(first + per_split, columns)
    x_rows = x + t.to(tl.int64)[:, None] * columns
    for each in range(smallest + lane, largest + 1, LANES):
        chosen = adapter == each
        if tl.max(chosen.to(tl.int32), 0) > 0:
            matrix = a + (each * rank + r).to(tl.int64)[None, :] * columns
            sums = tl.zeros((BLOCK_T, RANK), tl.float32)
            for start in range(first, end, BLOCK_K):
                inside = start + k < end
                values = tl.load(x_rows + (start + k)[None, :], mask=chosen[:, None] & inside[None, :], other=0.0)
                weights = tl.load(matrix + (start + k)[:, None], mask=(r < rank)[None, :] & inside[:, None], other=0.0)
                sums = tl.dot(values, weights, sums, input_precision=PRECISION)
            cells = out + (split * tokens + t).to(tl.int64)[:, None] * RANK + r[None, :]
            tl.store(cells, sums, mask=chosen[:, None])


@triton.jit
def multiply_b(
    h, b, scale, index, y, tokens, length, outputs, rank, y_stride,
    RANK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, LANES: tl.constexpr, SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """y += scale · h Bᵀ, only tokens with an adapter."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    lane, r = tl.program_id(2), tl.arange(0, RANK)
    adapter, smallest, largest = adapters_of(index, t, tokens, length)
    for each in range(smallest + lane, largest + 1, LANES):
        chosen = adapter == each
        if tl.max(chosen.to(tl.int32), 0) > 0:
            low = tl.zeros((BLOCK_T, RANK), tl.float32)
            for split in range(SPLITS):
                cells = h + (split * tokens + t).to(tl.int64)[:, None] * RANK + r[None, :]
                low += tl.load(cells, mask=chosen[:, None], other=0.0)
            matrix = b + (each * outputs + n).to(tl.int64)[None, :] * rank + r[:, None]
            weights = tl.load(matrix, mask=(n < outputs)[None, :] & (r < rank)[:, None], other=0.0)  # (RANK, N)
            delta = tl.dot(low.to(weights.dtype), weights, input_precision=PRECISION)
            cells = y + t.to(tl.int64)[:, None] * y_stride + n[None, :]
            shown = chosen[:, None] & (n < outputs)[None, :]
            sums = tl.load(cells, mask=shown, other=0.0).to(tl.float32) + delta * tl.load(scale + each)
            tl.store(cells, sums.to(y.dtype.element_ty), mask=shown)


def launch(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: Tensor, index: Tensor, tiles: LoraTiles | None = None
) -> None:
    """y (N, L, out), x (N, L, in), a (G, r, in), b (G, out, r), scale (G,) float32, index (N,) int32"""
    groups, rank, columns = a.shape
    rows, length, outputs = y.shape
    tokens = rows * length
    tiles = tiles or choose_tiles(tokens, groups, columns)
    padded_rank = max(16, 1 << (rank - 1).bit_length())
    h = x.new_empty(tiles.splits, tokens, padded_rank, dtype=torch.float32)
    x = x.contiguous()
    y_stride = y.stride(0) // length if rows > 1 else y.stride(1)  # between tokens
    options = {
        "RANK": padded_rank, "BLOCK_T": tiles.tokens, "LANES": tiles.lanes, "SPLITS": tiles.splits,
        "PRECISION": "ieee", "num_warps": 4,
    }  # fmt: skip
    blocks = -(-tokens // tiles.tokens)
    multiply_a[blocks, tiles.splits, tiles.lanes](
        x, a, index, h, tokens, length, columns, rank, BLOCK_K=tiles.columns, **options
    )
    multiply_b[blocks, -(-outputs // tiles.outputs), tiles.lanes](
        h, b, scale, index, y, tokens, length, outputs, rank, y_stride, BLOCK_N=tiles.outputs, **options
    )


def choose_tiles(tokens: int, groups: int, columns: int) -> LoraTiles:
    """Not measured yet: one tile and many programs for a decode step, large tiles for prompts."""
    if tokens <= 64:
        return LoraTiles(
            max(16, 1 << (tokens - 1).bit_length()), 128, 128, min(groups, tokens, 16), min(8, -(-columns // 256))
        )
    return LoraTiles(64, 64, 64, min(groups, 4), 1)


@torch.library.custom_op("regard::add_lora_triton", mutates_args=("y",))
def add_lora_triton(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: Tensor, index: Tensor) -> None:
    """`launch` as an operator for compiled graphs."""
    launch(y, x, a, b, scale, index)


@add_lora_triton.register_fake
def _(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: Tensor, index: Tensor) -> None:
    return None
