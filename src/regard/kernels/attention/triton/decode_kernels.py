"""Few queries before many keys: each program takes some of the keys, and what they find is joined (flash-decoding).

    program (b, kv head, part)      m, l, o of the part's keys, for all queries of the group at once
    program (b, head, query)        out = Σ_parts e^(m - M) o / (Σ_parts e^(m - M) l + e^(sink - M))        M = max m

A decode step reads every key once and computes next to nothing, so it takes as long as memory takes to hand them over:
the queries of a kv head share its loads, and one row's keys go to many processors. Keys that no query sees, before the
window or behind the text, are not read. Where pages are given, a key is found through its row's table. Dao et al. 2023,
"Flash-Decoding for long-context inference".
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.kernels.attention.triton.tile import EMPTY, LOG2E, NOWHERE, UNSEEN, bias_of, biased, capped, seen

PROGRAMS = 1024  # enough to keep every processor of a GPU reading
MOST = 64  # parts that one program joins
SCAN = tl.constexpr(512)  # positions looked through at a time


class DecodeConfig(NamedTuple):
    """What a kernel is compiled for; also what the functions of tile.py read of theirs."""

    page: int  # slots in a block of the table; 0: keys are contiguous
    valid: bool
    before: int  # how far before the query a key is seen, and how far after it; -1: without end
    after: int
    first: int  # so many positions are seen from everywhere
    cap: bool
    bias: str  # none, slopes, or a line of numbers, one a distance


@triton.jit
def attend_part(
    q, k, v, table, q_at, k_at, valid, bias, found,
    k_row, k_head, k_slot, v_row, v_head, v_slot, table_row, q_at_row, k_at_row, valid_row,
    inner, factor, reach, keys, split, parts,
    HEADS: tl.constexpr, QUERIES: tl.constexpr, TEXT: tl.constexpr, DIM: tl.constexpr, VALUE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """QUERIES rows of one kv head (its group times TEXT), in a tile of BLOCK_M, over a part of `split` keys."""
    head, part, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    rows, dims, values = tl.arange(0, BLOCK_M), tl.arange(0, DIM), tl.arange(0, VALUE)
    row = (b * HEADS + head) * QUERIES + rows  # among all queries (B, H, L)
    real = rows < QUERIES
    q_tile = tl.load(q + row[:, None] * DIM + dims[None, :], mask=real[:, None], other=0.0)  # (M, E)
    i = tl.load(q_at + b * q_at_row + rows % TEXT).to(tl.int32)  # (M,) where the queries stand
    q_head = head * (QUERIES // TEXT) + tl.minimum(rows, QUERIES - 1) // TEXT
    if FORM.bias != "none":
        bias = bias_of(bias, q_head[:, None], reach, FORM)

    begin, end = part * split, tl.minimum(part * split + split, keys)
    low, high = end, begin  # between them lie the keys that some query may see
    first, last = tl.min(i, 0), tl.max(i, 0)
    for start in range(begin, end, SCAN):
        n = start + tl.arange(0, SCAN)
        j = tl.load(k_at + b * k_at_row + n, mask=n < end, other=0).to(tl.int32)
        near = n < end
        if FORM.before >= 0:
            near &= (j >= first - FORM.before) | (j < FORM.first)
        if FORM.after >= 0:
            near &= j <= last + FORM.after
        low = tl.minimum(low, tl.min(tl.where(near, n, end), 0))
        high = tl.maximum(high, tl.max(tl.where(near, n + 1, begin), 0))

    m = tl.full([BLOCK_M], EMPTY, tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)  # noqa: E741 (the papers' letter)
    o = tl.zeros([BLOCK_M, VALUE], tl.float32)
    k += b * k_row + head * k_head
    v += b * v_row + head * v_head
    for start in range(low, high, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        there = n < high
        slot = n.to(tl.int64)
        if FORM.page:
            slot = tl.load(table + b * table_row + n // FORM.page, mask=there, other=0) * FORM.page + n % FORM.page
        k_tile = tl.load(k + slot[:, None] * k_slot + dims[None, :], mask=there[:, None], other=0.0)  # (N, E)
        v_tile = tl.load(v + slot[:, None] * v_slot + values[None, :], mask=there[:, None], other=0.0)  # (N, Ev)
        j = tl.load(k_at + b * k_at_row + n, mask=there, other=0).to(tl.int32)
        known = there
        if FORM.valid:
            known &= tl.load(valid + b * valid_row + n, mask=there, other=0) != 0
        document = tl.where(known, 0, NOWHERE)
        s = capped(tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee"), inner, FORM) * factor  # (M, N)
        s = biased(s, i[:, None], j[None, :], bias, reach, FORM)
        s = tl.where(seen(i[:, None], j[None, :], 0, document[None, :], FORM), s, UNSEEN)
        top = tl.maximum(m, tl.max(s, 1))
        shrink = tl.exp2(m - top)
        p = tl.exp2(s - top[:, None])
        l = l * shrink + tl.sum(p, 1)  # noqa: E741
        o = tl.dot(p.to(v_tile.dtype), v_tile, o * shrink[:, None], input_precision="ieee")
        m = top

    found += (row * parts + part) * (VALUE + 2)  # o, m, l
    tl.store(found[:, None] + values[None, :], o, mask=real[:, None])
    tl.store(found + VALUE, m, mask=real)
    tl.store(found + VALUE + 1, l, mask=real)


@triton.jit
def join_parts(
    found, sinks, out, parts,
    HEADS: tl.constexpr, TEXT: tl.constexpr, VALUE: tl.constexpr, PARTS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    n, values = tl.arange(0, PARTS), tl.arange(0, VALUE)
    there = n < parts
    found += (row * parts + n) * (VALUE + 2)
    m = tl.load(found + VALUE, mask=there, other=EMPTY)
    top = tl.max(m, 0)
    if SINKS:
        sink = tl.load(sinks + row // TEXT % HEADS).to(tl.float32) * LOG2E
        top = tl.maximum(top, sink)
    shrink = tl.exp2(m - top)
    l = tl.sum(tl.load(found + VALUE + 1, mask=there, other=0.0) * shrink, 0)  # noqa: E741
    if SINKS:
        l += tl.exp2(sink - top)  # noqa: E741
    o = tl.load(found[:, None] + values[None, :], mask=there[:, None], other=0.0)  # (parts, Ev)
    o = tl.sum(o * shrink[:, None], 0) / tl.where(l > 0, l, 1.0)  # zeros for a query that saw no key
    tl.store(out + row * VALUE + values, o.to(out.dtype.element_ty))


@torch.library.custom_op("regard::decode", mutates_args=())
def decode(
    q: Tensor,  # (B, H, L, E)
    k: Tensor,  # (B, K, S, E); with a table the pool (slots, K, E)
    v: Tensor,
    table: Tensor | None,  # (B, n)
    page: int,  # slots in a block of the table
    q_at: Tensor,  # (B, L)
    k_at: Tensor,  # (B, S)
    valid: Tensor | None,  # (B, S)
    before: int,  # how far before and after a query the keys are that it sees; -1: no limit
    after: int,
    first: int,  # positions that all see
    scale: float,
    cap: float | None,
    bias: str,  # kind, and its numbers: "slopes" (H,), or a "line" (H, 2 · reach + 1)
    numbers: Tensor | None,
    sinks: Tensor | None,  # (H,)
) -> Tensor:
    return launch(q, k, v, table, page, q_at, k_at, valid, before, after, first, scale, cap, bias, numbers, sinks)


@decode.register_fake
def _(q, k, v, *rest) -> Tensor:
    return q.new_empty(*q.shape[:-1], v.shape[-1])


def launch(
    q, k, v, table, page, q_at, k_at, valid, before, after, first, scale, cap, bias, numbers, sinks,
    block: int | None = None, parts: int | None = None, warps: int | None = None, stages: int = 3,
) -> Tensor:  # fmt: skip
    (rows, heads, text, dim), value, keys = q.shape, v.shape[-1], k_at.shape[1]
    q, k, v, q_at, k_at = q.contiguous(), dense(k), dense(v), dense(q_at), dense(k_at)
    kv_heads = k.shape[1]
    queries = heads // kv_heads * text
    block = (64 if q.element_size() == 2 else 32) if block is None else block
    parts = parts_for(rows * kv_heads, keys) if parts is None else parts
    split = -(-keys // (parts * block)) * block
    found = q.new_empty(rows, heads, text, parts, value + 2, dtype=torch.float32)
    out = q.new_empty(rows, heads, text, value)
    strides = [(0, x.stride(1), x.stride(0)) if page else x.stride()[:3] for x in (k, v)]
    log2e = math.log2(math.e)
    inner, factor = (0.0, scale * log2e) if cap is None else (2 * log2e * scale / cap, cap * log2e)
    attend_part[kv_heads, parts, rows](
        q, k, v, table, q_at, k_at, valid, numbers, found,
        *strides[0], *strides[1], table.stride(0) if page else 0, q_at.stride(0), k_at.stride(0),
        0 if valid is None else valid.stride(0),
        inner, factor, numbers.shape[1] // 2 if bias == "line" else 0, keys, split, parts,
        HEADS=kv_heads, QUERIES=queries, TEXT=text, DIM=dim, VALUE=value,
        BLOCK_M=max(16, next_power(queries)), BLOCK_N=block,
        FORM=DecodeConfig(page, valid is not None, before, after, first, cap is not None, bias),
        num_warps=warps or (4 if queries <= 64 else 8),
        num_stages=stages,
    )  # fmt: skip
    join_parts[(rows * heads * text,)](
        found, sinks, out, parts,
        HEADS=heads, TEXT=text, VALUE=value, PARTS=next_power(parts), SINKS=sinks is not None,
    )  # fmt: skip
    return out


def parts_for(pairs: int, keys: int) -> int:
    """Into how many parts the keys of each of these (row, kv head) pairs are split; none under 256 keys."""
    return max(1, min(PROGRAMS // pairs, keys // 256, MOST))


def next_power(n: int) -> int:
    """Of two; triton.next_power_of_2 takes many times as long, and a step has no time to lose."""
    return 1 << (n - 1).bit_length()


def dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
