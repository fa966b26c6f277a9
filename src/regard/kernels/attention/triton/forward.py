"""The forward of FlashAttention as one Triton kernel: a program loops over the keys of one tile of queries.

    S = Q_i K_jᵀ    m' = max(m, S)    P = 2^(S - m')    l = l 2^(m - m') + Σ P    O = O 2^(m - m') + P V_j

The mask is evaluated only for tiles of keys at the edges, where some pairs are not allowed; tiles without any allowed
pair are not read. The backward needs one number per row, log₂ Σ 2^s. Statistics (kernels/attention/statistics.py) are
accumulated in the same loop. Dao 2023, FlashAttention-2.
"""

import triton
import triton.language as tl

from regard.kernels.attention.triton.tile import (
    LOG2E,
    LOWEST,
    MASKED,
    add_bias,
    apply_cap,
    head_bias,
    is_allowed,
    load_bounds,
    load_positions,
    load_rows,
    ordered_bounds,
    program_tile,
    store_rows,
)


@triton.jit
def forward(
    Q, K, V, Out, LogSum, Sinks, Bias, QPositions, KPositions, QDocument, KDocument, Bounds, Stats, TopKey,
    heads, groups, length, keys, factor, tanh_factor, max_distance, first_keys, CONFIG: tl.constexpr,
):  # fmt: skip
    M: tl.constexpr = CONFIG.queries
    EV: tl.constexpr = CONFIG.value_dim
    tile, head = program_tile(length, M)
    start = (tl.cdiv(length, M) - 1 - tile) * M  # the last tile first: in a causal sequence it has the most keys
    b, h = head // heads, head % heads
    q = load_rows(Q, b, h, start, M, CONFIG.key_dim)  # (M, E)
    q_positions, q_document = load_positions(QPositions + b * length, QDocument + b * length, start, length, M, CONFIG)
    if CONFIG.ordered:
        lo, full_lo, full_hi, hi = ordered_bounds(start, M, CONFIG.before, CONFIG.after, keys, CONFIG.keys)
    else:
        lo, full_lo, full_hi, hi = load_bounds(Bounds, b, start, length, CONFIG)
    queries = (q, q_positions[:, None], q_document[:, None])
    key_inputs = (K, V, b, h // groups, KPositions + b * keys, KDocument + b * keys, keys)
    scoring = (factor, tanh_factor, head_bias(Bias, h, max_distance, CONFIG), max_distance, first_keys)

    zeros, empty = tl.zeros([M], tl.float32), tl.full([M], LOWEST, tl.float32)
    m, total = empty, zeros
    if CONFIG.sinks:  # one more score, without a value
        sink = tl.load(Sinks + h).to(tl.float32) * LOG2E
        m, total = zeros + sink, zeros + 1.0
    o = tl.zeros([M, EV], tl.float32)
    state = (m, total, o, zeros, zeros, empty, tl.full([M], -1, tl.int32))
    if CONFIG.ordered and CONFIG.first > 0:
        first_end = tl.cdiv(CONFIG.first, CONFIG.keys) * CONFIG.keys
        state = attend_keys(0, tl.minimum(first_end, lo), state, queries, key_inputs, scoring, True, CONFIG)
    if CONFIG.before >= 0 or not CONFIG.ordered:
        state = attend_keys(lo, full_lo, state, queries, key_inputs, scoring, True, CONFIG)
    if CONFIG.after >= 0 or not CONFIG.full_tiles:
        state = attend_keys(full_hi, hi, state, queries, key_inputs, scoring, True, CONFIG)
    # Last, because ptxas waits after every product of a loop that may be empty and is followed by another loop.
    state = attend_keys(full_lo, full_hi, state, queries, key_inputs, scoring, False, CONFIG)

    m, total, o, energy, on_first, top_score, top_key = state
    has_key = total > 0
    total = tl.where(has_key, total, 1.0)
    log_sum = tl.where(has_key, m + tl.log2(total), 0.0)
    store_rows(Out, o / total[:, None], b, h, start, M, EV)
    slot = start + tl.arange(0, M)
    inside, row = slot < length, head.to(tl.int64) * length + slot
    tl.store(LogSum + row, log_sum, mask=inside)
    if CONFIG.statistics:
        entropy = tl.log2(total) - energy / total
        if CONFIG.sinks:  # the entropy counts keys only
            entropy += tl.exp2(sink - log_sum) * (sink - log_sum)
        if CONFIG.ordered:
            on_first = weight_on_first(log_sum, queries, key_inputs, scoring, CONFIG)
        else:
            on_first /= total
        rows = tl.num_programs(0) // tl.cdiv(length, M) * tl.cast(length, tl.int64)
        tl.store(Stats + row, entropy / LOG2E, mask=inside)
        tl.store(Stats + rows + row, on_first, mask=inside)
        tl.store(Stats + 2 * rows + row, tl.exp2(top_score - log_sum), mask=inside)
        tl.store(TopKey + row, top_key, mask=inside)


@triton.jit
def attend_keys(lo, hi, state, queries, key_inputs, scoring, EDGE: tl.constexpr, CONFIG: tl.constexpr):
    """The state after the keys lo … hi; EDGE: apply the mask."""
    m, total, o, energy, on_first, top_score, top_key = state
    q, q_positions, q_document = queries
    K, V, b, g, KPositions, KDocument, keys = key_inputs
    factor, tanh_factor, bias, max_distance, first_keys = scoring
    N: tl.constexpr = CONFIG.keys
    for start in tl.range(lo, hi, N):
        k = load_rows(K, b, g, start, N, CONFIG.key_dim)  # (N, E)
        s = apply_cap(tl.dot(q, tl.trans(k), input_precision="ieee"), tanh_factor, CONFIG)  # (M, N)
        remaining_factor = factor
        if EDGE or CONFIG.bias != "none" or CONFIG.statistics and not CONFIG.ordered:
            k_positions, k_document = load_positions(KPositions, KDocument, start, keys, N, CONFIG)
        if EDGE or CONFIG.bias != "none":
            s = add_bias(s * factor, q_positions, k_positions[None, :], bias, max_distance, CONFIG)
            remaining_factor = 1.0
        if EDGE:
            allowed = is_allowed(q_positions, k_positions[None, :], q_document, k_document[None, :], CONFIG)
            s = tl.where(allowed, s, MASKED)
        if CONFIG.statistics:
            peak, column = row_argmax(s, N)
            peak *= remaining_factor
            top_key = tl.where(peak > top_score, start + column, top_key)
            top_score = tl.maximum(top_score, peak)
        else:
            peak = tl.max(s, 1) * remaining_factor
        new_m = tl.maximum(m, peak)
        x = s * remaining_factor - new_m[:, None]
        p = tl.exp2(x)  # (M, N)
        rescale = tl.exp2(m - new_m)
        if CONFIG.statistics:
            energy = (energy + total * (m - new_m)) * rescale + tl.sum(p * x, 1)
        if CONFIG.statistics and not CONFIG.ordered:
            on_first = on_first * rescale + tl.sum(tl.where((k_positions < first_keys)[None, :], p, 0.0), 1)
        total = total * rescale + tl.sum(p, 1)
        v = load_rows(V, b, g, start, N, CONFIG.value_dim)  # (N, Ev)
        o = tl.dot(p.to(v.dtype), v, o * rescale[:, None], input_precision="ieee")
        m = new_m
    return m, total, o, energy, on_first, top_score, top_key


@triton.jit
def row_argmax(s, N: tl.constexpr):
    """The maximum of each row, rounded, and its column: the lowest bits of the scores are replaced by their columns."""
    columns = (N - 1 - tl.arange(0, N))[None, :]
    tagged = (s.to(tl.int32, bitcast=True) & -N) | columns
    peak = tl.max(tagged.to(tl.float32, bitcast=True), 1)
    return peak, N - 1 - (peak.to(tl.int32, bitcast=True) & (N - 1))


@triton.jit
def weight_on_first(log_sum, queries, key_inputs, scoring, CONFIG: tl.constexpr):
    """The total weight of each row on the first keys of an ordered layout, where they are in the first slots."""
    q, q_positions, q_document = queries
    K, _V, b, g, KPositions, KDocument, keys = key_inputs
    factor, tanh_factor, bias, max_distance, first_keys = scoring
    M: tl.constexpr = CONFIG.queries
    total = tl.zeros([M], tl.float32)
    for start in tl.range(0, first_keys, CONFIG.keys):
        k = load_rows(K, b, g, start, CONFIG.keys, CONFIG.key_dim)
        s = apply_cap(tl.dot(q, tl.trans(k), input_precision="ieee"), tanh_factor, CONFIG) * factor
        k_positions, k_document = load_positions(KPositions, KDocument, start, keys, CONFIG.keys, CONFIG)
        s = add_bias(s, q_positions, k_positions[None, :], bias, max_distance, CONFIG)
        allowed = is_allowed(q_positions, k_positions[None, :], q_document, k_document[None, :], CONFIG)
        counted = allowed & (k_positions < first_keys)[None, :]
        total += tl.sum(tl.where(counted, tl.exp2(s - log_sum[:, None]), 0.0), 1)
    return total
