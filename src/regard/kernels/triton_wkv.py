"""RWKV's recurrence (rwkv.py) in Triton: one thread a channel, which goes through its text in tiles of T tokens.

Forward, with the sums before token t as (value, weight, peak), and l_t the logarithm of the divisor of out_t:

    state_t = e^{w} state_{t-1} + e^{k_t} (v_t, 1)          out_t = (value e^{peak} + e^{u + k_t} v_t) / e^{l_t}

Backward, R_t = ∂loss/∂state_t is a recurrence of the same kind from the end, so the same joining of sums keeps it safe:

    R_{t-1} = e^{-l_t} dout_t (1, -out_t) + e^{w} R_t
    dv_t = e^{k_t} R_t · (1, 0) + share_t dout_t            share_t = e^{u + k_t - l_t}
    dk_t = e^{k_t} R_t · (v_t, 1) + du_t                    du_t = share_t dout_t (v_t - out_t)
    dw_t = e^{w} ⟨R_t, state_{t-1}⟩                         state_{t-1} = e^{l_t} (past_t, 1 - share_t)

where past_t is what out_t has of state_{t-1}: kept for the backward, because out_t - share_t v_t would cancel. Tiles
are (T, channels): selective_scan/passes.py says why.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.kernels.segments import numbered
from regard.kernels.sums import EMPTY, Sums

T, BLOCK = 16, 32
NOTHING = tl.constexpr(EMPTY)


def wkv(
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    bonus: Tensor,
    state: Sums,
    segments: Tensor | None = None,
    valid: Tensor | None = None,
) -> tuple[Tensor, Sums]:
    """As in rwkv.py, with sums in float32; out has the dtype of v."""
    documents = None if segments is None else numbered(segments).int()
    counted = None if valid is None else valid.to(torch.int8)
    first = torch.stack(state, 1)  # (B, 3, F)
    out, last = wkv_op(k.to(v.dtype), v, decay.float(), bonus.float(), first, documents, counted)
    return out, Sums(*last.unbind(1))


@torch.library.custom_op("regard::wkv", mutates_args=())
def wkv_op(
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    bonus: Tensor,
    first: Tensor,
    documents: Tensor | None,
    counted: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """out (B, L, F), and the last value, weight and peak (B, 3, F)."""
    out, _, _, last = run_forward(k, v, decay, bonus, first, documents, counted, v.dtype)
    return out, last


@wkv_op.register_fake
def _(k, v, decay, bonus, first, documents, counted):
    return torch.empty_like(v, memory_format=torch.contiguous_format), torch.empty_like(first)


def run_forward(
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    bonus: Tensor,
    first: Tensor,
    documents: Tensor | None,
    counted: Tensor | None,
    dtype: torch.dtype,
    kept: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """out (B, L, F); if `kept` what it has of the past, and the logarithm of its divisor; the last state (B, 3, F)."""
    (batch, length, channels), device = v.shape, v.device
    out, last = torch.empty(v.shape, dtype=dtype, device=device), torch.empty(batch, 3, channels, device=device)
    past, log_sum = (torch.empty(v.shape, device=device) if kept else None for _ in range(2))
    forward_kernel[batch, triton.cdiv(channels, BLOCK)](
        k.contiguous(), v.contiguous(), decay, bonus, documents, counted, first.contiguous(), out, past, log_sum, last,
        0, length, channels, T, BLOCK, num_warps=1,
    )  # fmt: skip
    return out, past, log_sum, last


@torch.library.custom_op("regard::wkv_backward", mutates_args=())
def wkv_backward(
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    bonus: Tensor,
    first: Tensor,
    documents: Tensor | None,
    counted: Tensor | None,
    d_out: Tensor,
    d_last: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    # float32: gradients hold v - out, of which bf16 would leave little
    out, past, log_sum, last = run_forward(k, v, decay, bonus, first, documents, counted, torch.float32, kept=True)
    (batch, length, channels), device = v.shape, v.device
    dk, dv = (torch.empty(v.shape, dtype=v.dtype, device=device) for _ in range(2))
    sums = torch.empty(batch, 2, channels, device=device)  # of decay and bonus
    d_first = torch.empty(batch, 3, channels, device=device)
    backward_kernel[batch, triton.cdiv(channels, BLOCK)](
        k.contiguous(), v.contiguous(), decay, bonus, documents, counted, out, past, log_sum, first.contiguous(), last,
        d_out.contiguous(), d_last.contiguous(), dk, dv, sums, d_first, 0, length, channels, T, BLOCK, num_warps=1,
    )  # fmt: skip
    return dk, dv, sums[:, 0].sum(0), sums[:, 1].sum(0), d_first


@wkv_backward.register_fake
def _(k, v, decay, bonus, first, documents, counted, d_out, d_last):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v, decay, bonus, first))


def remember(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*inputs)


def backward(ctx: Any, d_out: Tensor, d_last: Tensor) -> tuple[Tensor | None, ...]:
    return *wkv_backward(*ctx.saved_tensors, d_out, d_last), None, None


wkv_op.register_autograd(backward, setup_context=remember)


@triton.jit(do_not_specialize=["shift"])
def forward_kernel(
    K, V, Decay, Bonus, Documents, Counted, First, Out, Past, LogSum, Last, shift, length, channels,
    T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """In row i of a tile stand the sums before token i: they take in token i - 1, and give out_i."""
    batch, r = tl.program_id(0).to(tl.int64), tl.arange(0, T)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    some = f < channels
    w, u = tl.load(Decay + f, some, 0.0), tl.load(Bonus + f, some, 0.0)
    value, weight, peak = three(First + batch * 3 * channels, f, channels)
    for tile in range(tl.cdiv(length + 1, T)):
        i = tile * T + r
        k, there = token(K, batch, i - 1, f, shift, length, channels)
        v, _ = token(V, batch, i - 1, f, shift, length, channels)
        adds, fade, _ = steps(Documents, Counted, batch, i - 1, w, length)
        adds = adds & there
        fade = fade + tl.zeros((T, BLOCK), tl.float32)
        own = (tl.where(adds, v, 0.0), tl.where(adds, 1.0, 0.0), tl.where(adds, k, NOTHING))
        values, weights, peaks = scanned(own[0], own[1], own[2], fade, value, weight, peak, r == 0)
        value, weight, peak = row(values, r, T - 1), row(weights, r, T - 1), row(peaks, r, T - 1)
        if tile == length // T:
            last = Last + batch * 3 * channels + f
            tl.store(last, row(values, r, length % T), some)
            tl.store(last + channels, row(weights, r, length % T), some)
            tl.store(last + 2 * channels, row(peaks, r, length % T), some)
        k, there = token(K, batch, i, f, shift, length, channels)
        v, _ = token(V, batch, i, f, shift, length, channels)
        _, _, goes_on = steps(Documents, Counted, batch, i, w, length)
        peaks = tl.where(goes_on, peaks, NOTHING)
        top = tl.maximum(peaks, u[None, :] + k)
        past, now = tl.exp(peaks - top), tl.exp(u[None, :] + k - top)
        total = past * weights + now
        here = (batch * length + i)[:, None] * channels + f[None, :] + shift
        tl.store(Out + here, ((past * values + now * v) / total).to(Out.dtype.element_ty), there)
        if Past is not None:
            tl.store(Past + here, past * values / total, there)
            tl.store(LogSum + here, top + tl.log(total), there)


@triton.jit(do_not_specialize=["shift"])
def backward_kernel(
    K, V, Decay, Bonus, Documents, Counted, Out, Past, LogSum, First, Last, dOut, dLast, dK, dV, dSums, dFirst,
    shift, length, channels, T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Tiles from the last to the first, and in each the tokens from its last: row r is token j, which needs R_j.

    Of dLast (B, 3, F) the peak's gradient is not read: the numbers are value · e^peak and weight · e^peak, so it says
    nothing that theirs do not.
    """
    batch, r = tl.program_id(0).to(tl.int64), tl.arange(0, T)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    some, tiles = f < channels, tl.cdiv(length, T)
    w, u = tl.load(Decay + f, some, 0.0), tl.load(Bonus + f, some, 0.0)
    peak = tl.load(Last + (batch * 3 + 2) * channels + f, some, NOTHING)
    known = peak > 0.5 * NOTHING
    ra = tl.where(known, tl.load(dLast + batch * 3 * channels + f, some, 0.0), 0.0)
    rb = tl.where(known, tl.load(dLast + (batch * 3 + 1) * channels + f, some, 0.0), 0.0)
    peak = tl.where(known, -peak, NOTHING)
    dw, du = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for back in range(tiles):
        tile = tiles - 1 - back
        j = tile * T + T - 1 - r
        d_out, there = token(dOut, batch, j + 1, f, shift, length, channels)
        out, _ = token(Out, batch, j + 1, f, shift, length, channels)
        log_sum, _ = token(LogSum, batch, j + 1, f, shift, length, channels)
        _, fade, goes_on = steps(Documents, Counted, batch, j + 1, w, length)
        reads = goes_on & there
        fade = tl.where(there, fade, 0.0)
        own_a, own_b = tl.where(reads, d_out, 0.0), tl.where(reads, -d_out * out, 0.0)
        ras, rbs, peaks = scanned(own_a, own_b, tl.where(reads, -log_sum, NOTHING), fade, ra, rb, peak, r == 0)
        ra, rb, peak = row(ras, r, T - 1), row(rbs, r, T - 1), row(peaks, r, T - 1)
        k, there = token(K, batch, j, f, shift, length, channels)
        v, _ = token(V, batch, j, f, shift, length, channels)
        d_out, _ = token(dOut, batch, j, f, shift, length, channels)
        out, _ = token(Out, batch, j, f, shift, length, channels)
        log_sum, _ = token(LogSum, batch, j, f, shift, length, channels)
        adds, _, _ = steps(Documents, Counted, batch, j, w, length)
        adds = adds & there
        kept = tl.where(adds, tl.exp(k + peaks), 0.0)
        past, _ = token(Past, batch, j, f, shift, length, channels)
        share = tl.where(there, tl.exp(u[None, :] + k - log_sum), 0.0)
        met = tl.exp(tl.maximum(w[None, :] + peaks + log_sum, NOTHING)) * (ras * past + rbs * (1.0 - share))
        dw += tl.sum(tl.where(adds, met, 0.0), 0)
        share *= d_out
        by_state, by_bonus = kept * (ras * v + rbs), share * (v - out)
        here = (batch * length + j)[:, None] * channels + f[None, :] + shift
        tl.store(dV + here, (kept * ras + share).to(dV.dtype.element_ty), there)
        tl.store(dK + here, (by_state + by_bonus).to(dK.dtype.element_ty), there)
        du += tl.sum(by_bonus, 0)
    tl.store(dSums + batch * 2 * channels + f, dw, some)
    tl.store(dSums + (batch * 2 + 1) * channels + f, du, some)
    here = batch * length * channels + f  # the first token is left: it reads the first state
    d_out, out = tl.load(dOut + here, some, 0.0).to(tl.float32), tl.load(Out + here, some, 0.0).to(tl.float32)
    fade = w if Counted is None else tl.where(tl.load(Counted + batch * length) != 0, w, 0.0)
    ra, rb, peak, _ = join(ra, rb, peak, w, d_out, -d_out * out, -tl.load(LogSum + here, some, 0.0), fade)
    a, b, top = three(First + batch * 3 * channels, f, channels)
    scale = tl.exp(tl.maximum(peak + top, NOTHING))
    tl.store(dFirst + batch * 3 * channels + f, scale * ra, some)
    tl.store(dFirst + (batch * 3 + 1) * channels + f, scale * rb, some)
    tl.store(dFirst + (batch * 3 + 2) * channels + f, scale * (ra * a + rb * b), some)


@triton.jit
def three(X, f, channels):
    """Value, weight and peak of these channels."""
    some = f < channels
    value, weight = tl.load(X + f, some, 0.0), tl.load(X + channels + f, some, 0.0)
    return value, weight, tl.load(X + 2 * channels + f, some, NOTHING)


@triton.jit
def token(X, batch, t, f, shift, length, channels):
    """(T, BLOCK) in float32, and where there is one."""
    there = (f < channels)[None, :] & ((t >= 0) & (t < length))[:, None]
    here = (batch * length + t)[:, None] * channels + f[None, :] + shift
    return tl.load(X + here, there, 0.0).to(tl.float32), there


@triton.jit
def steps(Documents, Counted, batch, t, w, length):
    """Of tokens t: do they add to the sums (T, 1), how much fades before they do (T, BLOCK), is their text the same."""
    inside = tl.minimum(tl.maximum(t, 0), length - 1)
    adds = (t >= 0) & (t < length)
    if Counted is not None:
        adds = adds & (tl.load(Counted + batch * length + inside) != 0)
    goes_on = t > -2
    fade = tl.where(adds[:, None], w[None, :], 0.0)
    if Documents is not None:
        Documents += batch * length
        previous = tl.minimum(tl.maximum(t - 1, 0), length - 1)
        goes_on = tl.load(Documents + inside) == tl.load(Documents + previous)
        fade = tl.where(goes_on[:, None], fade, NOTHING)
    return adds[:, None], fade, goes_on[:, None]


@triton.jit
def row(x, r, i):
    return tl.sum(tl.where((r == i)[:, None], x, 0.0), 0)


@triton.jit
def scanned(value, weight, peak, fade, carried_value, carried_weight, carried_peak, is_first):
    """Sums over all rows so far, and what was carried in before the first."""
    old = tl.maximum(carried_peak[None, :] + fade, NOTHING)
    top = tl.maximum(old, peak)
    mine, theirs = tl.exp(peak - top), tl.exp(old - top)
    value = tl.where(is_first[:, None], value * mine + carried_value[None, :] * theirs, value)
    weight = tl.where(is_first[:, None], weight * mine + carried_weight[None, :] * theirs, weight)
    peak = tl.where(is_first[:, None], top, peak)
    value, weight, peak, _ = tl.associative_scan((value, weight, peak, fade), 0, join)
    return value, weight, peak


@triton.jit
def join(value, weight, peak, fade, value_next, weight_next, peak_next, fade_next):
    old = tl.maximum(peak + fade_next, NOTHING)
    top = tl.maximum(old, peak_next)
    mine, theirs = tl.exp(old - top), tl.exp(peak_next - top)
    return value * mine + value_next * theirs, weight * mine + weight_next * theirs, top, fade + fade_next
