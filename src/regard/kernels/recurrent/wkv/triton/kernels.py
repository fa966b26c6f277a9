"""RWKV's recurrence in Triton: one thread per channel, which processes a span of the sequence in tiles of T tokens.

Forward, with the sums before token t as (value, weight, peak), and l_t the logarithm of the divisor of out_t:

    state_t = e^{w} state_{t-1} + e^{k_t} (v_t, 1)          out_t = (value e^{peak} + e^{u + k_t} v_t) / e^{l_t}

Backward, R_t = ∂loss/∂state_t is a recurrence of the same kind from the end, so the same merge prevents overflow:

    R_{t-1} = e^{-l_t} dout_t (1, -out_t) + e^{w} R_t
    dv_t = e^{k_t} R_t · (1, 0) + share_t dout_t            share_t = e^{u + k_t - l_t}
    dk_t = e^{k_t} R_t · (v_t, 1) + du_t                    du_t = share_t dout_t (v_t - out_t)
    dw_t = e^{w} ⟨R_t, state_{t-1}⟩                         state_{t-1} = e^{l_t} (past_t, 1 - share_t)

where past_t is the part of out_t from state_{t-1}; it is saved, because out_t - share_t v_t would lose digits.
In both directions row r of a tile holds the sums before its token, so it adds the previous token. The sums carried to
the next tile or span therefore lack the last token, and the next tile adds it. Tiles are (T, channels) for the reason
given in selective_scan/triton/kernels.py.
"""

import triton
import triton.language as tl

from regard.kernels.recurrent.wkv import EMPTY

EMPTY_PEAK = tl.constexpr(EMPTY)


@triton.jit(do_not_specialize=["shift"])
def add_kernel(
    X, Y, Z, Decay, Documents, Updates, Added, shift, length, channels, spans,
    SPAN: tl.constexpr, T: tl.constexpr, BLOCK: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Added (B, spans, 4, F): the sums over the tokens of each span, and its log decay."""
    batch, span, f, exists = program_tile(spans, channels, BLOCK)
    r, w = tl.arange(0, T), tl.load(Decay + f, exists, 0.0)
    value, weight = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    log_decay, peak = tl.zeros((BLOCK,), tl.float32), tl.full((BLOCK,), EMPTY_PEAK, tl.float32)
    for step in range(SPAN // T):
        if REVERSE:
            j = (span + 1) * SPAN - 1 - step * T - r
            added = gradient_contributions(X, Y, Z, Documents, Updates, batch, j + 1, f, w, shift, length, channels)
        else:
            i = span * SPAN + step * T + r
            added = contributions(X, Y, Documents, Updates, batch, i - 1, f, w, shift, length, channels)
        value, weight, peak, _, _, _ = scan_tile(added, value, weight, peak, r, T)
        log_decay += tl.sum(added[3], 0)
    sums = Added + (batch * spans + span) * 4 * channels + f
    tl.store(sums, value, exists)
    tl.store(sums + channels, weight, exists)
    tl.store(sums + 2 * channels, peak, exists)
    tl.store(sums + 3 * channels, log_decay, exists)


@triton.jit
def carry_kernel(Added, First, Borders, channels, spans, BLOCK: tl.constexpr, REVERSE: tl.constexpr):
    """Borders (B, spans, 3, F), one after the other: the only serial step."""
    batch, f = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = f < channels
    value, weight, peak = load_sums(First + batch * 3 * channels, f, channels)
    for i in range(spans):
        index = batch * spans + (spans - 1 - i if REVERSE else i)
        border = Borders + index * 3 * channels + f
        tl.store(border, value, exists)
        tl.store(border + channels, weight, exists)
        tl.store(border + 2 * channels, peak, exists)
        more_value, more_weight, more_peak = load_sums(Added + index * 4 * channels, f, channels)
        log_decay = tl.load(Added + (index * 4 + 3) * channels + f, exists, 0.0)
        value, weight, peak, _ = merge(value, weight, peak, log_decay, more_value, more_weight, more_peak, log_decay)


@triton.jit(do_not_specialize=["shift"])
def read_kernel(
    K, V, Decay, Bonus, Documents, Updates, Borders, Out, Past, LogSum, Last, shift, length, channels, spans,
    SPAN: tl.constexpr, T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Row r of a tile holds the sums before token i: it adds token i - 1, and computes out_i."""
    batch, span, f, exists = program_tile(spans, channels, BLOCK)
    r, w, u = tl.arange(0, T), tl.load(Decay + f, exists, 0.0), tl.load(Bonus + f, exists, 0.0)
    value, weight, peak = load_sums(Borders + (batch * spans + span) * 3 * channels, f, channels)
    for step in range(tl.minimum(SPAN, length + 1 - span * SPAN + T - 1) // T):
        i = span * SPAN + step * T + r
        added = contributions(K, V, Documents, Updates, batch, i - 1, f, w, shift, length, channels)
        value, weight, peak, values, weights, peaks = scan_tile(added, value, weight, peak, r, T)
        if span * SPAN + step * T == length // T * T:
            last = Last + batch * 3 * channels + f
            tl.store(last, take_row(values, r, length % T), exists)
            tl.store(last + channels, take_row(weights, r, length % T), exists)
            tl.store(last + 2 * channels, take_row(peaks, r, length % T), exists)
        k, inside = load_tokens(K, batch, i, f, shift, length, channels)
        v, _ = load_tokens(V, batch, i, f, shift, length, channels)
        _, _, continues = load_steps(Documents, Updates, batch, i, w, length)
        peaks = tl.where(continues, peaks, EMPTY_PEAK)
        max_peak = tl.maximum(peaks, u[None, :] + k)
        past, current = tl.exp(peaks - max_peak), tl.exp(u[None, :] + k - max_peak)
        total = past * weights + current
        offset = (batch * length + i)[:, None] * channels + f[None, :] + shift
        tl.store(Out + offset, ((past * values + current * v) / total).to(Out.dtype.element_ty), inside)
        if Past is not None:
            tl.store(Past + offset, past * values / total, inside)
            tl.store(LogSum + offset, max_peak + tl.log(total), inside)


@triton.jit(do_not_specialize=["shift"])
def grad_kernel(
    K, V, Decay, Bonus, Documents, Updates, Out, Past, LogSum, First, Borders, dOut, dK, dV, dParameters, dFirst,
    shift, length, channels, spans, SPAN: tl.constexpr, T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Tiles from the last to the first, and tokens of a tile likewise: row r is token j, which needs R_j."""
    batch, span, f, exists = program_tile(spans, channels, BLOCK)
    r, w, u = tl.arange(0, T), tl.load(Decay + f, exists, 0.0), tl.load(Bonus + f, exists, 0.0)
    r_value, r_weight, peak = load_sums(Borders + (batch * spans + span) * 3 * channels, f, channels)
    dw, du = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    tiles = tl.minimum(SPAN, length - span * SPAN + T - 1) // T
    for step in range(tiles):
        j = span * SPAN + (tiles - step) * T - 1 - r
        added = gradient_contributions(
            dOut, Out, LogSum, Documents, Updates, batch, j + 1, f, w, shift, length, channels
        )
        r_value, r_weight, peak, r_values, r_weights, peaks = scan_tile(added, r_value, r_weight, peak, r, T)
        k, inside = load_tokens(K, batch, j, f, shift, length, channels)
        v, _ = load_tokens(V, batch, j, f, shift, length, channels)
        d_out, _ = load_tokens(dOut, batch, j, f, shift, length, channels)
        out, _ = load_tokens(Out, batch, j, f, shift, length, channels)
        log_sum, _ = load_tokens(LogSum, batch, j, f, shift, length, channels)
        adds, _, _ = load_steps(Documents, Updates, batch, j, w, length)
        adds = adds & inside
        key_weight = tl.where(adds, tl.exp(k + peaks), 0.0)
        past, _ = load_tokens(Past, batch, j, f, shift, length, channels)
        share = tl.where(inside, tl.exp(u[None, :] + k - log_sum), 0.0)
        d_decay = tl.exp(tl.maximum(w[None, :] + peaks + log_sum, EMPTY_PEAK)) * (
            r_values * past + r_weights * (1.0 - share)
        )
        dw += tl.sum(tl.where(adds, d_decay, 0.0), 0)
        share *= d_out
        by_state, by_bonus = key_weight * (r_values * v + r_weights), share * (v - out)
        offset = (batch * length + j)[:, None] * channels + f[None, :] + shift
        tl.store(dV + offset, (key_weight * r_values + share).to(dV.dtype.element_ty), inside)
        tl.store(dK + offset, (by_state + by_bonus).to(dK.dtype.element_ty), inside)
        du += tl.sum(by_bonus, 0)
    sums = dParameters + (batch * spans + span) * 2 * channels + f
    tl.store(sums, dw, exists)
    tl.store(sums + channels, du, exists)
    if span == 0:  # add the first token, which reads the initial state
        offset = batch * length * channels + f
        d_out = tl.load(dOut + offset, exists, 0.0).to(tl.float32)
        out = tl.load(Out + offset, exists, 0.0).to(tl.float32)
        decay = w if Updates is None else tl.where(tl.load(Updates + batch * length) != 0, w, 0.0)
        r_value, r_weight, peak, _ = merge(
            r_value, r_weight, peak, w, d_out, -d_out * out, -tl.load(LogSum + offset, exists, 0.0), decay
        )
        first_value, first_weight, first_peak = load_sums(First + batch * 3 * channels, f, channels)
        scale = tl.exp(tl.maximum(peak + first_peak, EMPTY_PEAK))
        tl.store(dFirst + batch * 3 * channels + f, scale * r_value, exists)
        tl.store(dFirst + (batch * 3 + 1) * channels + f, scale * r_weight, exists)
        d_peak = scale * (r_value * first_value + r_weight * first_weight)
        tl.store(dFirst + (batch * 3 + 2) * channels + f, d_peak, exists)


@triton.jit
def program_tile(spans, channels, BLOCK: tl.constexpr):
    """Batch row, span and channels of this program, and which channels exist."""
    program, f = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    return (program // spans).to(tl.int64), program % spans, f, f < channels


@triton.jit
def contributions(K, V, Documents, Updates, batch, t, f, w, shift, length, channels):
    """The value, weight and peak that tokens t add, and the log decay of the previous sums, (T, BLOCK) each."""
    k, inside = load_tokens(K, batch, t, f, shift, length, channels)
    v, _ = load_tokens(V, batch, t, f, shift, length, channels)
    adds, decay, _ = load_steps(Documents, Updates, batch, t, w, length)
    adds = adds & inside
    return tl.where(adds, v, 0.0), tl.where(adds, 1.0, 0.0), tl.where(adds, k, EMPTY_PEAK), decay


@triton.jit
def gradient_contributions(dOut, Out, LogSum, Documents, Updates, batch, t, f, w, shift, length, channels):
    """The contributions of tokens t in reverse: the gradients of the state from their outputs."""
    d_out, inside = load_tokens(dOut, batch, t, f, shift, length, channels)
    out, _ = load_tokens(Out, batch, t, f, shift, length, channels)
    log_sum, _ = load_tokens(LogSum, batch, t, f, shift, length, channels)
    _, decay, continues = load_steps(Documents, Updates, batch, t, w, length)
    reads = continues & inside
    decay = tl.where(inside, decay, 0.0)
    return tl.where(reads, d_out, 0.0), tl.where(reads, -d_out * out, 0.0), tl.where(reads, -log_sum, EMPTY_PEAK), decay


@triton.jit
def load_sums(X, f, channels):
    """Value, weight and peak of these channels."""
    exists = f < channels
    value, weight = tl.load(X + f, exists, 0.0), tl.load(X + channels + f, exists, 0.0)
    return value, weight, tl.load(X + 2 * channels + f, exists, EMPTY_PEAK)


@triton.jit
def load_tokens(X, batch, t, f, shift, length, channels):
    """(T, BLOCK) in float32, and which of them exist."""
    inside = (f < channels)[None, :] & ((t >= 0) & (t < length))[:, None]
    offset = (batch * length + t)[:, None] * channels + f[None, :] + shift
    return tl.load(X + offset, inside, 0.0).to(tl.float32), inside


@triton.jit
def load_steps(Documents, Updates, batch, t, w, length):
    """Per token whether it adds to the sums (T, 1), the log decay before it (T, BLOCK), and whether it continues a
    document (T, 1).
    """
    inside = tl.minimum(tl.maximum(t, 0), length - 1)
    adds = (t >= 0) & (t < length)
    if Updates is not None:
        adds = adds & (tl.load(Updates + batch * length + inside) != 0)
    continues = t > -2
    decay = tl.where(adds[:, None], w[None, :], 0.0)
    if Documents is not None:
        Documents += batch * length
        previous = tl.minimum(tl.maximum(t - 1, 0), length - 1)
        continues = tl.load(Documents + inside) == tl.load(Documents + previous)
        decay = tl.where(continues[:, None], decay, EMPTY_PEAK)
    return adds[:, None], decay, continues[:, None]


@triton.jit
def take_row(x, r, i):
    return tl.sum(tl.where((r == i)[:, None], x, 0.0), 0)


@triton.jit
def scan_tile(added, value, weight, peak, r, T: tl.constexpr):
    """The carried sums merged with the contribution of each row: the sums after the last row, and those of all rows."""
    first, old = (r == 0)[:, None], tl.maximum(peak[None, :] + added[3], EMPTY_PEAK)
    max_peak = tl.maximum(old, added[2])
    added_factor, old_factor = tl.exp(added[2] - max_peak), tl.exp(old - max_peak)
    values = tl.where(first, added[0] * added_factor + value[None, :] * old_factor, added[0])
    weights = tl.where(first, added[1] * added_factor + weight[None, :] * old_factor, added[1])
    values, weights, peaks, _ = tl.associative_scan(
        (values, weights, tl.where(first, max_peak, added[2]), added[3]), 0, merge
    )
    return take_row(values, r, T - 1), take_row(weights, r, T - 1), take_row(peaks, r, T - 1), values, weights, peaks


@triton.jit
def merge(value, weight, peak, decay, value_next, weight_next, peak_next, decay_next):
    old = tl.maximum(peak + decay_next, EMPTY_PEAK)
    max_peak = tl.maximum(old, peak_next)
    a, b = tl.exp(old - max_peak), tl.exp(peak_next - max_peak)
    return value * a + value_next * b, weight * a + weight_next * b, max_peak, decay + decay_next
