"""Causal attention over a paged cache whose result for a query is bitwise the same in prompts and in decode steps.

    o = softmax(q Kᵀ · scale) V        over the keys up to the query, or those in its window

One kernel computes chunks of any length; a decode step is a chunk of one token. The order of all sums is a function of
the query's position alone:

    tiles of queries    start at multiples of TOKENS, so a query has the same row of its tile in every chunk
    tiles of keys       start at multiples of BLOCK_N; a tile without allowed keys changes nothing: its weights are 0
    splits of keys      have SPLIT keys, twice as many for each doubling of the position from SPLIT · MAX_SPLITS on

A split starts from an empty state, and the states of all splits are joined in order: in a decode step, which would
otherwise occupy few multiprocessors, by the last of several programs that divide the splits among them; in a prompt by
the program itself.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.kernels.attention.triton.tile import LOWEST, MASKED
from regard.kernels.triton_decode_linear import arrival_counters, next_power_of_2
from regard.kernels.triton_invariant_linear import EXACT

SPLIT = tl.constexpr(256)
MAX_SPLITS = tl.constexpr(16)
PROGRAMS = 528  # four per multiprocessor of a large GPU
BLOCK_M = 64  # rows per tile of queries: TOKENS times the heads that share a key, padded to a power of two


@triton.jit
def join(m, l, o, other_m, other_l, other_o):  # noqa: E741 (the papers' letter)
    """Maxima, sums and outputs over two sets of keys."""
    new_m = tl.maximum(m, other_m)
    rescale, weight = tl.exp2(m - new_m), tl.exp2(other_m - new_m)
    return new_m, l * rescale + weight * other_l, o * rescale[:, None] + weight[:, None] * other_o


@triton.jit
def attend_chunk(
    q, k_pool, v_pool, table, positions, counts, partial, counters, out,
    table_stride, position_stride, length, factor, before,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A tile of queries of one of HEADS kv heads, each of which GROUP query heads share."""
    b, programs = tl.program_id(2).to(tl.int64), tl.num_programs(1) // HEADS
    head, index = tl.program_id(1) // programs, tl.program_id(1) % programs
    first = tl.load(positions + b * position_stride).to(tl.int32)
    base = (first // TOKENS + tl.program_id(0)) * TOKENS
    stop = tl.minimum(base + TOKENS, first + tl.load(counts + b))  # no query of the tile attends to this key
    WIDTH: tl.constexpr = BLOCK_M // TOKENS
    rows, dims = tl.arange(0, BLOCK_M), tl.arange(0, DIM)
    position, member = base + rows // WIDTH, rows % WIDTH
    shown = (position >= first) & (position < first + length) & (member < GROUP)
    cell = (((b * length + position - first) * HEADS + head) * GROUP + member)[:, None] * DIM + dims[None, :]

    size = base * 0 + SPLIT
    while size * MAX_SPLITS < base + TOKENS:
        size *= 2
    splits = tl.where(stop > tl.maximum(base, first), tl.cdiv(stop, size), 0)
    low = base * 0
    if WINDOW:
        low = tl.maximum(tl.maximum(base, first) - before, 0) // BLOCK_N * BLOCK_N

    queries = tl.load(q + cell, mask=shown[:, None], other=0.0)  # (M, E)
    all_m = tl.full([BLOCK_M], LOWEST, tl.float32)
    all_l = tl.zeros([BLOCK_M], tl.float32)
    all_o = tl.zeros([BLOCK_M, DIM], tl.float32)
    partial += ((b * HEADS + head) * MAX_SPLITS * WIDTH + member) * (DIM + 2)  # o, m, l of the only query
    for split in range(index, splits, programs):
        m = tl.full([BLOCK_M], LOWEST, tl.float32)
        l = tl.zeros([BLOCK_M], tl.float32)  # noqa: E741
        o = tl.zeros([BLOCK_M, DIM], tl.float32)
        for start in range(tl.maximum(split * size, low), tl.minimum(split * size + size, stop), BLOCK_N):
            n = start + tl.arange(0, BLOCK_N)
            inside = n < stop
            page = tl.load(table + b * table_stride + n // PAGE, mask=inside, other=0)
            slot = (page * PAGE + n % PAGE)[:, None] * (HEADS * DIM) + (head * DIM + dims)[None, :]
            k = tl.load(k_pool + slot, mask=inside[:, None], other=0.0)  # (N, E)
            v = tl.load(v_pool + slot, mask=inside[:, None], other=0.0)
            scores = tl.dot(queries, tl.trans(k), input_precision="ieee") * factor  # (M, N)
            allowed = n[None, :] <= position[:, None]
            if WINDOW:
                allowed &= n[None, :] >= position[:, None] - before
            scores = tl.where(allowed, scores, MASKED)
            new_m = tl.maximum(m, tl.max(scores, 1))
            rescale = tl.exp2(m - new_m)
            p = tl.exp2(scores - new_m[:, None])
            l = l * rescale + tl.sum(p, 1)  # noqa: E741
            o = tl.dot(p.to(v.dtype), v, o * rescale[:, None], input_precision="ieee")
            m = new_m
        all_m, all_l, all_o = join(all_m, all_l, all_o, m, l, o)
        if programs > 1:
            mine = partial + split * WIDTH * (DIM + 2)
            tl.store(mine[:, None] + dims[None, :], o, mask=shown[:, None])
            tl.store(mine + DIM, m, mask=shown)
            tl.store(mine + DIM + 1, l, mask=shown)

    stored = shown & (rows * 0 + index == 0)
    if (programs > 1) & (splits > 1) & (index < splits):
        tl.debug_barrier()  # all stores of the program precede its arrival
        counter = counters + b * HEADS + head
        arrived = tl.atomic_add(counter, 1, sem="acq_rel")
        tl.debug_barrier()
        last = tl.minimum(programs, splits) - 1
        stored = shown & (rows * 0 + arrived == last)
        if arrived == last:
            all_m = tl.full([BLOCK_M], LOWEST, tl.float32)
            all_l = tl.zeros([BLOCK_M], tl.float32)
            all_o = tl.zeros([BLOCK_M, DIM], tl.float32)
            for split in range(splits):
                other = partial + split * WIDTH * (DIM + 2)
                their_o = tl.load(other[:, None] + dims[None, :], mask=shown[:, None], other=0.0, cache_modifier=".cg")
                their_m = tl.load(other + DIM, mask=shown, other=LOWEST, cache_modifier=".cg")
                their_l = tl.load(other + DIM + 1, mask=shown, other=0.0, cache_modifier=".cg")
                all_m, all_l, all_o = join(all_m, all_l, all_o, their_m, their_l, their_o)
            tl.store(counter, 0)  # for the next launch
    y = all_o / tl.where(all_l > 0, all_l, 1.0)[:, None]  # zeros for padding without any key
    tl.store(out + cell, y.to(out.dtype.element_ty), mask=stored[:, None])


def attend_invariant(
    q: Tensor,  # (B, L, H, E)
    k_pool: Tensor,  # (slots, K, E), with the keys of these queries
    v_pool: Tensor,
    table: Tensor,  # (B, n)
    page: int,
    positions: Tensor,  # (B, L), consecutive in each row
    counts: Tensor,  # (B,) int32: the queries of each row; the others, at its end, are padding
    scale: float,
    before: int,  # the number of earlier tokens in the window; -1: all
    block: int = 64,
    programs: int | None = None,  # that divide the splits of a row and kv head, if L = 1
) -> Tensor:
    """(B, L, H · E)"""
    (batch, length, heads, dim), kv_heads = q.shape, k_pool.shape[1]
    width = next_power_of_2(heads // kv_heads)
    block_m = max(BLOCK_M, width)
    tokens = block_m // width
    tiles = -(-(length + tokens - 1) // tokens)  # the first may start before the chunk
    if programs is None:
        splits = min(MAX_SPLITS.value, -(-table.shape[1] * page // SPLIT.value))
        programs = max(1, min(PROGRAMS // (batch * kv_heads), splits))
    programs = programs if length == 1 else 1
    states = batch * kv_heads * MAX_SPLITS.value * width if programs > 1 else 1
    partial = torch.empty(states * (dim + 2), device=q.device)
    out = torch.empty_like(q)
    attend_chunk[tiles, kv_heads * programs, batch](
        q, k_pool, v_pool, table, positions, counts, partial, arrival_counters(q.device), out,
        table.stride(0), positions.stride(0), length, scale * math.log2(math.e), before,
        HEADS=kv_heads, GROUP=heads // kv_heads, DIM=dim, PAGE=page, WINDOW=before >= 0,
        TOKENS=tokens, BLOCK_M=block_m, BLOCK_N=block,
        num_warps=4 if block_m == BLOCK_M and dim <= 128 else 8, num_stages=3 if dim <= 128 else 2, **EXACT,
    )  # fmt: skip
    return out.flatten(2)
