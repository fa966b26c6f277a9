"""The selective scan in Triton: one thread per channel, with T tokens in its registers, state by state.

A program handles a chunk of T tokens and a block of channels, and loops over the N numbers of the state:

    add     Σ_s exp(A Σ_{r>s} Δ_r) Δ_s u_s B_s, which the chunk adds to the state; REVERSE: the same for the adjoint
    read    h_t from the state at the border of the chunk, and y_t = Σ_n C_t h_t + D u_t
    grad    h_t recomputed; g_t = ∂loss/∂h_t = C_t dy_t + a_{t+1} g_{t+1} with a_t = exp(Δ_t A), and all gradients

Tiles are (T, channels) with channels along a warp, so that a scan over time stays inside each thread. `shift` ensures
it: it is 0, but not a compile-time constant. If rows were known to be aligned to 16 bytes, Triton would assign several
channels to a thread and distribute time over lanes. Chunks are independent; carry.py connects their borders.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["shift"])
def add_kernel(
    X, Delta, Bias, A, B, Documents, Added, Elapsed, x_strides, delta_strides, shift, length, chunks, channels,
    N: tl.constexpr, T: tl.constexpr, BLOCK: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Added (B, chunks, N, F); Elapsed (B, chunks, F) = ΣΔ. X is u, or dy for the adjoint; A (N, F), B (B, N, L)."""
    chunk, batch, start, t, f, exists = program_tile(length, chunks, channels, T, BLOCK)
    _, delta = load_steps(Delta, delta_strides, Bias, batch, t, f, shift, exists, channels)
    x = load_tokens(X, x_strides, batch, t, f, shift, exists)
    elapsed_total = tl.sum(delta, 0)  # (BLOCK,)
    if REVERSE:
        elapsed = tl.cumsum(delta, 0)  # from the border before the chunk to each token
    else:
        elapsed, x = elapsed_total[None, :] - tl.cumsum(delta, 0), x * delta
    if Documents is not None:
        Documents += batch * length
        first = tl.load(Documents + tl.maximum(start - 1, 0))
        last = tl.load(Documents + tl.minimum(start + T - 1, length - 1))
        document = tl.load(Documents + tl.minimum(t, length - 1))
        x = tl.where((document == (first if REVERSE else last))[:, None], x, 0.0)
        elapsed_total = tl.where(first == last, elapsed_total, float("inf"))
    tl.store(Elapsed + chunk * channels + f, elapsed_total, f < channels)
    for n in range(N):
        rate = tl.load(A + n * channels + f, f < channels, 0.0)
        b = tl.load(B + (batch * N + n) * length + t, t < length, 0.0)
        added = tl.sum(tl.exp2(elapsed * (rate * LOG2E)[None, :]) * x * b[:, None], 0)
        tl.store(Added + (chunk * N + n) * channels + f, added, f < channels)


@triton.jit(do_not_specialize=["shift"])
def read_kernel(
    U, Delta, Bias, A, B, C, D, Documents, Borders, Y, u_strides, delta_strides, y_strides,
    shift, length, chunks, channels, N: tl.constexpr, T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    chunk, batch, start, t, f, exists = program_tile(length, chunks, channels, T, BLOCK)
    _, delta = load_steps(Delta, delta_strides, Bias, batch, t, f, shift, exists, channels)
    u = load_tokens(U, u_strides, batch, t, f, shift, exists)
    x, y = delta * u, tl.zeros((T, BLOCK), tl.float32)
    if D is not None:
        y += u * tl.load(D + f, f < channels, 0.0)[None, :]
    Borders += (batch * (chunks + 1) + chunk % chunks) * N * channels
    for n in range(N):
        rate = tl.load(A + n * channels + f, f < channels, 0.0)
        before = tl.load(Borders + n * channels + f, f < channels, 0.0)
        b = tl.load(B + (batch * N + n) * length + t, t < length, 0.0)
        c = tl.load(C + (batch * N + n) * length + t, t < length, 0.0)
        _, h = scan_states(delta, rate, x * b[:, None], before, Documents, batch, t, start, length)
        y += h * c[:, None]
    tl.store(pointers(Y, y_strides, batch, t, f, shift), y.to(Y.dtype.element_ty), exists)


@triton.jit(do_not_specialize=["shift"])
def grad_kernel(
    U, Delta, Bias, A, B, C, D, Documents, Borders, dY, dBorders, dU, dDelta, dA, dB, dC, dD, dBias,
    u_strides, delta_strides, dy_strides, out_strides, shift, length, chunks, channels,
    N: tl.constexpr, T: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Gradients of each chunk: dA (B, chunks, N, F), dD and dBias (B, chunks, F); of each block of channels: dB and dC
    (blocks, B, N, L). WIDTH is N, at least 16.
    """
    chunk, batch, start, t, f, exists = program_tile(length, chunks, channels, T, BLOCK)
    raw, delta = load_steps(Delta, delta_strides, Bias, batch, t, f, shift, exists, channels)
    u = load_tokens(U, u_strides, batch, t, f, shift, exists)
    dy = load_tokens(dY, dy_strides, batch, t, f, shift, exists)
    x = delta * u
    dx, d_delta = tl.zeros((T, BLOCK), tl.float32), tl.zeros((T, BLOCK), tl.float32)
    d_b, d_c, columns = tl.zeros((T, WIDTH), tl.float32), tl.zeros((T, WIDTH), tl.float32), tl.arange(0, WIDTH)
    ones = tl.full((BLOCK, WIDTH), 1.0, dY.dtype.element_ty)
    border = batch * (chunks + 1) + chunk % chunks
    for n in range(N):
        rate = tl.load(A + n * channels + f, f < channels, 0.0)
        before = tl.load(Borders + (border * N + n) * channels + f, f < channels, 0.0)
        after = tl.load(dBorders + ((border + 1) * N + n) * channels + f, f < channels, 0.0)
        b = tl.load(B + (batch * N + n) * length + t, t < length, 0.0)
        c = tl.load(C + (batch * N + n) * length + t, t < length, 0.0)
        a, h = scan_states(delta, rate, x * b[:, None], before, Documents, batch, t, start, length)
        g = dy * c[:, None] + tl.where((t == start + T - 1)[:, None], after[None, :], 0.0)
        g = scan_adjoint(a, g, T, BLOCK)
        d_decay = g * (h - x * b[:, None])  # ∂loss/∂(Δ A): h_t - Δ_t u_t B_t is the decayed h_{t-1}
        tl.store(dA + (chunk * N + n) * channels + f, tl.sum(d_decay * delta, 0), f < channels)
        d_delta += d_decay * rate[None, :]
        dx += g * b[:, None]
        d_b += sum_channels(columns[None, :] == n, g * x, ones)
        d_c += sum_channels(columns[None, :] == n, h * dy, ones)
    du = dx * delta
    if D is not None:
        du += dy * tl.load(D + f, f < channels, 0.0)[None, :]
        tl.store(dD + chunk * channels + f, tl.sum(dy * u, 0), f < channels)
    tl.store(pointers(dU, out_strides, batch, t, f, shift), du.to(dU.dtype.element_ty), exists)
    d_delta += dx * u
    if Bias is not None:
        d_delta /= 1 + tl.exp(-raw)  # softplus' = sigmoid
        tl.store(dBias + chunk * channels + f, tl.sum(d_delta, 0), f < channels)
    tl.store(pointers(dDelta, out_strides, batch, t, f, shift), d_delta.to(dDelta.dtype.element_ty), exists)
    block = tl.program_id(1).to(tl.int64) * (tl.num_programs(0) // chunks) + batch
    offset = (block * N + columns)[None, :] * length + t[:, None]
    tl.store(dB + offset, d_b, (columns < N)[None, :] & (t < length)[:, None])
    tl.store(dC + offset, d_c, (columns < N)[None, :] & (t < length)[:, None])


@triton.jit
def program_tile(length, chunks, channels, T: tl.constexpr, BLOCK: tl.constexpr):
    """The chunk of this program among those of all rows, its row, first token, tokens and channels, and a mask."""
    chunk = tl.program_id(0).to(tl.int64)
    start = chunk % chunks * T
    t, f = start + tl.arange(0, T), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    return chunk, chunk // chunks, start, t, f, (t < length)[:, None] & (f < channels)[None, :]


@triton.jit
def pointers(X, strides, batch, t, f, shift):
    return X + shift + batch * strides[0] + t[:, None] * strides[1] + f[None, :]


@triton.jit
def load_tokens(X, strides, batch, t, f, shift, exists):
    """(T, BLOCK) in float32; zeros where `exists` is False."""
    return tl.load(pointers(X, strides, batch, t, f, shift), exists, 0.0).to(tl.float32)


@triton.jit
def load_steps(Delta, strides, Bias, batch, t, f, shift, exists, channels):
    """delta + bias and Δ, both (T, BLOCK). Δ = softplus(delta + bias) if there is a bias, else delta.

    Δ is 0 where `exists` is False.
    """
    if Bias is None:
        raw = load_tokens(Delta, strides, batch, t, f, shift, exists)
        delta = raw
    else:
        raw = tl.load(pointers(Delta, strides, batch, t, f, shift), exists, float("-inf")).to(tl.float32)
        raw += tl.load(Bias + f, f < channels, 0.0)[None, :]
        delta = tl.maximum(raw, 0.0) + log1p(tl.exp(-tl.abs(raw)))
    return raw, delta


@triton.jit
def log1p(x):
    """log(1 + x) for 0 ≤ x ≤ 1, accurate for small x: 2 artanh(s) = 2 (s + s³/3 + s⁵/5 + …), s = x / (2 + x) ≤ 1/3."""
    s = x / (2 + x)
    total = tl.full(s.shape, 1 / 15, tl.float32)
    for i in tl.static_range(7):
        total = total * (s * s) + 1 / (13 - 2 * i)
    return 2 * s * total


@triton.jit
def scan_states(delta, rate, b, before, Documents, batch, t, start, length):
    """a and h (T, BLOCK): the decay of each token, and the state after it."""
    a = tl.exp2(delta * (rate * LOG2E)[None, :])
    if Documents is not None:
        Documents += batch * length
        current, previous = tl.minimum(t, length - 1), tl.minimum(tl.maximum(t - 1, 0), length - 1)
        a = tl.where((tl.load(Documents + current) == tl.load(Documents + previous))[:, None], a, 0.0)
    b += tl.where((t == start)[:, None], a * before[None, :], 0.0)
    _, h = tl.associative_scan((a, b), 0, compose)
    return a, h


@triton.jit
def scan_adjoint(a, g, T: tl.constexpr, BLOCK: tl.constexpr):
    """g_t + a_{t+1} g_{t+1} + a_{t+1} a_{t+2} g_{t+2} + …, (T, BLOCK)."""
    # Reversed by hand: `reverse` would also permute the lanes of the warp, by shuffles.
    one = tl.full((T, BLOCK), 1.0, tl.float32)
    _, _, g = tl.associative_scan((tl.flip(a, 0), one, tl.flip(g, 0)), 0, compose_adjoint)
    return tl.flip(g, 0)


@triton.jit
def sum_channels(column, x, ones):
    """(T, WIDTH) with the sums over the channels of x (T, BLOCK) in one column (1, WIDTH), zeros in the others.

    On the tensor cores: every column of the product with ones (BLOCK, WIDTH) holds the sums.
    """
    return tl.where(column, tl.dot(x.to(ones.dtype), ones, input_precision="tf32x3"), 0.0)


@triton.jit
def compose(a, b, a_next, b_next):
    """The step h -> a · h + b followed by the next one."""
    return a * a_next, b * a_next + b_next


@triton.jit
def compose_adjoint(a, rest, g, a_earlier, rest_earlier, g_earlier):
    """Two adjacent runs of tokens as one; the scan runs from the end, so the later run comes first.

    A run is (a of its first token, the product of a over its other tokens, ∂loss/∂h at its first token).
    """
    decay = rest_earlier * a
    return a_earlier, decay * rest, g_earlier + decay * g
