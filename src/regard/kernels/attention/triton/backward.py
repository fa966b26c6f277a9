"""The backward of FlashAttention: weights are recomputed from log₂ Σ 2^s of each row, once for dK, dV and once for dQ.

    P = 2^(S - lse)     dV_j = Σ_i Pᵀ dO_i     dS = P ⊙ (dO_i V_jᵀ - D_i)     D_i = rowsum(dO_i ⊙ O_i)
    dK_j = scale · Σ_i (dS ⊙ cap')ᵀ Q_i        dQ_i = scale · Σ_j (dS ⊙ cap') K_j

A program of `key_gradients` loops over the queries that attend to one tile of keys, of all heads that share it; a
program of `query_gradients` loops over the keys of one tile of queries. Two of seven products are computed twice, but
each sum stays in the registers of one program: no atomic adds, and the result is deterministic. Dao 2023,
FlashAttention-2.
"""

import triton
import triton.language as tl

from regard.kernels.attention.triton.tile import (
    MASKED,
    add_bias,
    apply_cap,
    head_bias,
    is_allowed,
    load_bounds,
    load_positions,
    load_rows,
    offset_index,
    ordered_bounds,
    program_tile,
    store_rows,
)


@triton.jit
def row_dots(Out, DOut, Delta, heads, length, CONFIG: tl.constexpr):
    """D = rowsum(dO ⊙ O) of a tile of queries."""
    M: tl.constexpr = CONFIG.queries
    tile, head = program_tile(length, M)
    start, b, h = tile * M, head // heads, head % heads
    out = load_rows(Out, b, h, start, M, CONFIG.value_dim).to(tl.float32)
    d_out = load_rows(DOut, b, h, start, M, CONFIG.value_dim).to(tl.float32)
    slot = start + tl.arange(0, M)
    tl.store(Delta + head.to(tl.int64) * length + slot, tl.sum(out * d_out, 1), mask=slot < length)


@triton.jit
def key_gradients(
    Q, K, V, DOut, DK, DV, LogSum, Delta, Bias, QPositions, KPositions, QDocument, KDocument, Bounds,
    heads, groups, length, keys, scale, factor, tanh_factor, max_distance, CONFIG: tl.constexpr,
):  # fmt: skip
    N: tl.constexpr = CONFIG.keys
    E: tl.constexpr = CONFIG.key_dim
    EV: tl.constexpr = CONFIG.value_dim
    tile, head = program_tile(keys, N)
    start, b, g = tile * N, head // (heads // groups), head % (heads // groups)
    k, v = load_rows(K, b, g, start, N, E), load_rows(V, b, g, start, N, EV)
    k_positions, k_document = load_positions(KPositions + b * keys, KDocument + b * keys, start, keys, N, CONFIG)
    tile_inputs = (k, v, k_positions[:, None], k_document[:, None])
    if CONFIG.ordered:
        lo, full_lo, full_hi, hi = ordered_bounds(start, N, CONFIG.after, CONFIG.before, length, CONFIG.queries)
        if start < CONFIG.first:
            hi = length
    else:
        lo, full_lo, full_hi, hi = load_bounds(Bounds, b, start, keys, CONFIG)

    dk, dv = tl.zeros([N, E], tl.float32), tl.zeros([N, EV], tl.float32)
    for n in range(groups):
        h = g * groups + n
        row = (b * heads + h).to(tl.int64) * length
        loop_inputs = (
            Q,
            DOut,
            b,
            h,
            LogSum + row,
            Delta + row,
            QPositions + b * length,
            QDocument + b * length,
            length,
        )
        scoring = (factor, tanh_factor, head_bias(Bias, h, max_distance, CONFIG), max_distance)
        dk, dv = sum_over_queries(full_lo, full_hi, dk, dv, tile_inputs, loop_inputs, scoring, False, CONFIG)
        if CONFIG.after >= 0 or not CONFIG.ordered:
            dk, dv = sum_over_queries(lo, full_lo, dk, dv, tile_inputs, loop_inputs, scoring, True, CONFIG)
        if CONFIG.before >= 0 or not CONFIG.full_tiles:
            dk, dv = sum_over_queries(full_hi, hi, dk, dv, tile_inputs, loop_inputs, scoring, True, CONFIG)
    store_rows(DK, dk * scale, b, g, start, N, E)
    store_rows(DV, dv, b, g, start, N, EV)


@triton.jit
def sum_over_queries(lo, hi, dk, dv, tile_inputs, loop_inputs, scoring, EDGE: tl.constexpr, CONFIG: tl.constexpr):
    """dk and dv with the queries lo … hi added. Tiles are (N, M), keys first; EDGE: apply the mask."""
    k, v, k_positions, k_document = tile_inputs
    Q, DOut, b, h, LogSum, Delta, QPositions, QDocument, length = loop_inputs
    M: tl.constexpr = CONFIG.queries
    for start in tl.range(lo, hi, M):
        q = load_rows(Q, b, h, start, M, CONFIG.key_dim)  # (M, E)
        q_positions, q_document = load_positions(QPositions, QDocument, start, length, M, CONFIG)
        log_sum = load_scalars(LogSum, start, length, M, EDGE and not CONFIG.full_tiles)[None, :]
        products = tl.dot(k, tl.trans(q), input_precision="ieee")  # (N, M)
        p, cap_derivative = recompute_weights(
            products, log_sum, q_positions[None, :], k_positions, q_document[None, :], k_document, scoring, EDGE, CONFIG
        )
        d_out = load_rows(DOut, b, h, start, M, CONFIG.value_dim)  # (M, Ev)
        dv = tl.dot(p.to(d_out.dtype), d_out, dv, input_precision="ieee")
        delta = load_scalars(Delta, start, length, M, EDGE and not CONFIG.full_tiles)[None, :]
        ds = p * (tl.dot(v, tl.trans(d_out), input_precision="ieee") - delta) * cap_derivative
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def query_gradients(
    Q, K, V, DOut, DQ, DBias, LogSum, Delta, Bias, QPositions, KPositions, QDocument, KDocument, Bounds,
    heads, groups, length, keys, scale, factor, tanh_factor, max_distance, CONFIG: tl.constexpr,
):  # fmt: skip
    M: tl.constexpr = CONFIG.queries
    E: tl.constexpr = CONFIG.key_dim
    tile, head = program_tile(length, M)
    start, b, h = (tl.cdiv(length, M) - 1 - tile) * M, head // heads, head % heads
    q, d_out = load_rows(Q, b, h, start, M, E), load_rows(DOut, b, h, start, M, CONFIG.value_dim)
    q_positions, q_document = load_positions(QPositions + b * length, QDocument + b * length, start, length, M, CONFIG)
    row = head.to(tl.int64) * length
    log_sum = load_scalars(LogSum + row, start, length, M, not CONFIG.full_tiles)
    delta = load_scalars(Delta + row, start, length, M, not CONFIG.full_tiles)
    tile_inputs = (q, d_out, log_sum[:, None], delta[:, None], q_positions[:, None], q_document[:, None])
    loop_inputs = (
        K,
        V,
        b,
        h // groups,
        KPositions + b * keys,
        KDocument + b * keys,
        keys,
        DBias + h * (2 * max_distance + 1),
    )
    scoring = (factor, tanh_factor, head_bias(Bias, h, max_distance, CONFIG), max_distance)
    if CONFIG.ordered:
        lo, full_lo, full_hi, hi = ordered_bounds(start, M, CONFIG.before, CONFIG.after, keys, CONFIG.keys)
    else:
        lo, full_lo, full_hi, hi = load_bounds(Bounds, b, start, length, CONFIG)

    dq = tl.zeros([M, E], tl.float32)
    if CONFIG.ordered and CONFIG.first > 0:
        first_end = tl.cdiv(CONFIG.first, CONFIG.keys) * CONFIG.keys
        dq = sum_over_keys(0, tl.minimum(first_end, lo), dq, tile_inputs, loop_inputs, scoring, True, CONFIG)
    if CONFIG.before >= 0 or not CONFIG.ordered:
        dq = sum_over_keys(lo, full_lo, dq, tile_inputs, loop_inputs, scoring, True, CONFIG)
    if CONFIG.after >= 0 or not CONFIG.full_tiles:
        dq = sum_over_keys(full_hi, hi, dq, tile_inputs, loop_inputs, scoring, True, CONFIG)
    # Last, for the reason given in forward.py.
    dq = sum_over_keys(full_lo, full_hi, dq, tile_inputs, loop_inputs, scoring, False, CONFIG)
    store_rows(DQ, dq * scale, b, h, start, M, E)


@triton.jit
def sum_over_keys(lo, hi, dq, tile_inputs, loop_inputs, scoring, EDGE: tl.constexpr, CONFIG: tl.constexpr):
    """dq with the keys lo … hi added; EDGE: apply the mask."""
    q, d_out, log_sum, delta, q_positions, q_document = tile_inputs
    K, V, b, g, KPositions, KDocument, keys, DBias = loop_inputs
    N: tl.constexpr = CONFIG.keys
    for start in tl.range(lo, hi, N):
        k = load_rows(K, b, g, start, N, CONFIG.key_dim)  # (N, E)
        v = load_rows(V, b, g, start, N, CONFIG.value_dim)  # (N, Ev)
        k_positions, k_document = load_positions(KPositions, KDocument, start, keys, N, CONFIG)
        products = tl.dot(q, tl.trans(k), input_precision="ieee")  # (M, N)
        p, cap_derivative = recompute_weights(
            products, log_sum, q_positions, k_positions[None, :], q_document, k_document[None, :], scoring, EDGE, CONFIG
        )
        ds = p * (tl.dot(d_out, tl.trans(v), input_precision="ieee") - delta)
        if CONFIG.learned:
            add_to_offsets(DBias, ds, q_positions, k_positions[None, :], scoring[3])
        dq = tl.dot((ds * cap_derivative).to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit
def add_to_offsets(DBias, ds, q_positions, k_positions, max_distance):
    """Add dS of a tile to the gradient of its offsets; one sum if all offsets are beyond max_distance."""
    max_offset, min_offset = tl.max(k_positions) - tl.min(q_positions), tl.min(k_positions) - tl.max(q_positions)
    if max_offset <= -max_distance:
        tl.atomic_add(DBias, tl.sum(ds))
    elif min_offset >= max_distance:
        tl.atomic_add(DBias + 2 * max_distance, tl.sum(ds))
    else:
        tl.atomic_add(DBias + offset_index(q_positions, k_positions, max_distance), ds, mask=ds != 0)


@triton.jit
def recompute_weights(
    products,
    log_sum,
    q_positions,
    k_positions,
    q_document,
    k_document,
    scoring,
    EDGE: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """P of a tile, and the derivative of the cap there."""
    factor, tanh_factor, bias, max_distance = scoring
    s, cap_derivative = apply_cap(products, tanh_factor, CONFIG), 1.0
    if CONFIG.cap:
        cap_derivative = 1 - s * s
    s = add_bias(s * factor, q_positions, k_positions, bias, max_distance, CONFIG)
    if EDGE:
        s = tl.where(is_allowed(q_positions, k_positions, q_document, k_document, CONFIG), s, MASKED)
    return tl.exp2(s - log_sum), cap_derivative


@triton.jit
def load_scalars(X, start, length, SIZE: tl.constexpr, EDGE: tl.constexpr):
    """(SIZE,): one number per token, from `start` on; EDGE: zeros after the last token."""
    slot = start + tl.arange(0, SIZE)
    if EDGE:
        return tl.load(X + slot, mask=slot < length, other=0.0)
    else:
        return tl.load(X + slot)
