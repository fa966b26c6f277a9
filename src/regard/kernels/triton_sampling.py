"""Sampling by temperature, top-k, top-p and min-p in one kernel, without a sort and without the host.

    z = (l - max l) / T        kept: z ≥ log min_p, the k largest l, then the fewest of these that reach a mass of top_p
    the first token whose cumulative probability exceeds u, among those that are kept

A filter keeps the logits from a cutoff on; ties are kept. Floats are ordered like integers made of their bits, and each
pass over the row tries three cutoffs, so 16 passes find the cutoff exactly, eight for bfloat16. One program handles one
row, so its result does not depend on the other rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-2139095041)  # the order of -inf
SETTINGS = tl.constexpr(5)  # temperature, top_k, top_p, log min_p, u
UNUSED_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}  # at the end of the value as a float32


@triton.jit
def order_of(x, SHIFT: tl.constexpr):
    """Integers in the order of the floats."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # + 0.0: no negative zero
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def value_of(order, SHIFT: tl.constexpr):
    """The float from which on the order of floats is at least this."""
    bits = order.to(tl.int32) << SHIFT
    value = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return tl.where(value == value, value, -float("inf"))  # the order of -inf has bits of a NaN


@triton.jit
def load_block(logits, start, vocab, BLOCK: tl.constexpr):
    i = start + tl.arange(0, BLOCK)
    return i, tl.load(logits + i, mask=i < vocab, other=-float("inf")).to(tl.float32)


@triton.jit
def row_max(logits, vocab, BLOCK: tl.constexpr):
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        _, x = load_block(logits, start, vocab, BLOCK)
        best = tl.maximum(best, x)
    return tl.max(best, 0)


@triton.jit
def kept_amounts(logits, vocab, largest, scale, first, second, third, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The number, or the mass, of the logits that are at least each of three cuts; a count needs cuts above -inf."""
    one = tl.zeros([BLOCK], tl.float32)  # exact for counts: a row has fewer than 2^24 · BLOCK tokens
    two, three = one, one
    for start in range(0, vocab, BLOCK):
        _, x = load_block(logits, start, vocab, BLOCK)
        amount = tl.full([BLOCK], 1.0, tl.float32)
        if not COUNT:
            amount = tl.exp2((x - largest) * scale)
        one += tl.where(x >= first, amount, 0.0)
        two += tl.where(x >= second, amount, 0.0)
        three += tl.where(x >= third, amount, 0.0)
    return tl.sum(one, 0), tl.sum(two, 0), tl.sum(three, 0)


@triton.jit
def find_cut(
    logits, vocab, largest, scale, low, high, wanted,
    COUNT: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest cut from `low` on that keeps at least the wanted amount; `low` does, and `high` keeps none."""
    while high - low > 1:
        step = (high - low + 3) // 4
        first, second, third = low + step, tl.minimum(low + 2 * step, high - 1), tl.minimum(low + 3 * step, high - 1)
        one, two, three = kept_amounts(
            logits, vocab, largest, scale, value_of(first, SHIFT), value_of(second, SHIFT), value_of(third, SHIFT),
            COUNT, BLOCK,
        )  # fmt: skip
        if three >= wanted:
            low = third
        elif two >= wanted:
            low, high = second, third
        elif one >= wanted:
            low, high = first, second
        else:  # also for NaN
            high = first
    return low


@triton.jit
def kept_probabilities(logits, i, inside, largest, scale, cut, least):
    """exp z of the tokens i that are kept, 0 of the others, in float64."""
    x = tl.load(logits + i, mask=inside, other=-float("inf")).to(tl.float32)
    return tl.where((x >= cut) & (x - largest >= least), tl.exp2((x - largest) * scale), 0.0).to(tl.float64)


@triton.jit
def draw(
    logits, vocab, largest, scale, cut, least, u,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The first kept token whose cumulative probability exceeds u: first its chunk of the vocabulary is found."""
    chunk = tl.arange(0, CHUNKS)
    size = tl.cdiv(vocab, CHUNKS)
    sums = tl.zeros([CHUNKS, WIDTH], tl.float64)
    for start in range(0, size, WIDTH):
        offset = start + tl.arange(0, WIDTH)[None, :]
        i = chunk[:, None] * size + offset
        inside = (offset < size) & (i < vocab)
        sums += kept_probabilities(logits, i, inside, largest, scale, cut, least)
    masses = tl.sum(sums, 1)  # (CHUNKS,)
    ends = tl.cumsum(masses, 0)
    target = tl.sum(masses, 0) * u
    # Rounding may leave no sum above the target: then it is the last token that is kept.
    found = tl.min(tl.where((ends > target) & (masses > 0), chunk, CHUNKS), 0)
    chosen = tl.minimum(found, tl.max(tl.where(masses > 0, chunk, 0), 0))
    before = tl.sum(tl.where(chunk == chosen, ends - masses, 0.0), 0)
    offset = tl.arange(0, CHUNK)
    i = chosen * size + offset
    p = kept_probabilities(logits, i, (offset < size) & (i < vocab), largest, scale, cut, least)
    exceeds = (before + tl.cumsum(p, 0) > target) & (p > 0)
    last = tl.max(tl.where(p > 0, i, 0), 0)
    return tl.minimum(tl.min(tl.where(exceeds, i, 2147483647), 0), last)


@triton.jit
def sample_row(
    logits, settings, ids, logprobs, vocab, stride,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    settings += row * SETTINGS

    largest = row_max(logits, vocab, BLOCK)
    sums = tl.zeros([BLOCK], tl.float32)
    first = tl.full([BLOCK], 2147483647, tl.int32)
    for start in range(0, vocab, BLOCK):
        i, x = load_block(logits, start, vocab, BLOCK)
        sums += tl.exp(x - largest)  # NaN if a logit is NaN or +inf, or all are -inf
        first = tl.minimum(first, tl.where(x == largest, i, 2147483647))
    log_sum = tl.log(tl.sum(sums, 0))
    id = tl.minimum(tl.min(first, 0), vocab - 1)

    temperature = tl.load(settings).to(tl.float32)
    if temperature > 0:
        temperature = tl.maximum(temperature, 1e-30)
        scale = LOG2_E / temperature
        top_k = tl.load(settings + 1)
        top_p = tl.load(settings + 2).to(tl.float32)
        low = tl.full([], LOWEST >> SHIFT, tl.int64)
        high = order_of(largest, SHIFT).to(tl.int64) + 1
        if (top_k > 0) & (top_k < vocab):
            low = find_cut(logits, vocab, largest, scale, low, high, top_k.to(tl.float32), True, SHIFT, BLOCK)
        if top_p < 1:
            cut = value_of(low, SHIFT)
            mass, _, _ = kept_amounts(logits, vocab, largest, scale, cut, cut, cut, False, BLOCK)
            low = find_cut(logits, vocab, largest, scale, low, high, top_p * mass, False, SHIFT, BLOCK)
        least, u = temperature * tl.load(settings + 3).to(tl.float32), tl.load(settings + 4)
        id = draw(logits, vocab, largest, scale, value_of(low, SHIFT), least, u, CHUNKS, CHUNK, BLOCK // CHUNKS)
    tl.store(ids + row, id.to(tl.int64))
    tl.store(logprobs + row, tl.load(logits + id).to(tl.float32) - largest - log_sum)


def sample_rows(logits: Tensor, settings: Tensor, block: int = 8192, warps: int = 32) -> tuple[Tensor, Tensor]:
    """The ids (B,) and their log-probabilities (B,) from (B, V) logits; NaN in a row that is not finite.

    settings: (B, 5) float64: temperature (0: the most likely token), top_k (0: all), top_p, log min_p, u in [0, 1).
    """
    rows, vocab = logits.shape
    logits = logits.contiguous() if logits.stride(-1) != 1 else logits
    ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, device=logits.device)
    block = min(block, max(16, triton.next_power_of_2(vocab)))
    chunks = max(1, block // 32)
    sample_row[(rows,)](
        logits, settings, ids, logprobs, vocab, logits.stride(0),
        SHIFT=UNUSED_BITS[logits.dtype], BLOCK=block, CHUNKS=chunks,
        CHUNK=triton.next_power_of_2(triton.cdiv(vocab, chunks)), num_warps=max(1, min(warps, block // 256)),
    )  # fmt: skip
    return ids, logprobs


@triton.jit
def log_softmax_row(logits, out, vocab, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    largest = row_max(logits, vocab, BLOCK)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        _, x = load_block(logits, start, vocab, BLOCK)
        sums += tl.exp(x - largest)
    log_sum = tl.log(tl.sum(sums, 0))
    for start in range(0, vocab, BLOCK):
        i, x = load_block(logits, start, vocab, BLOCK)
        tl.store(out + row * vocab + i, x - largest - log_sum, mask=i < vocab)


def log_softmax_rows(logits: Tensor, block: int = 8192) -> Tensor:
    """(B, V) -> (B, V) float32 log-probabilities; NaN in a row that is not finite.

    The order of sums in torch's kernel depends on the alignment of a row, and so on its place in the batch.
    """
    rows, vocab = logits.shape
    logits = logits.contiguous() if logits.stride(-1) != 1 else logits
    out = torch.empty(rows, vocab, device=logits.device)
    block = min(block, max(16, triton.next_power_of_2(vocab)))
    if rows:
        log_softmax_row[(rows,)](
            logits, out, vocab, logits.stride(0), BLOCK=block, num_warps=max(1, min(16, block // 256))
        )
    return out
