"""What happens to one tile of products q·k on its way to scores: cap, bias, mask; the same for forward and backward.

Scores are in units of log 2, so that weights are powers of two: exp(s) = 2^(s · log₂ e), and the scale and log₂ e are
one `factor`. A cap c turns the product into tanh(scale · q·k / c) first, and its factor is c · log₂ e.

Where queries and keys stand comes with one axis of length one each, (M, 1) and (1, N), or (1, M) and (N, 1) where the
backward has the keys in front.
"""

from typing import NamedTuple

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
UNSEEN = tl.constexpr(-1e30)  # the score of a key that is not seen; finite, so that no row becomes NaN
EMPTY = tl.constexpr(-1e20)  # the highest score of a row before any key: far above the unseen, so that they weigh 0
NOWHERE = tl.constexpr(-(2**31))  # the document of a key that nobody sees


class TileConfig(NamedTuple):
    """What a kernel is compiled for."""

    queries: int  # tokens of a tile
    keys: int
    wide: int  # coordinates of queries and keys, and of values, up to the next power of two
    value_wide: int
    before: int  # how far before the query a key is seen, and how far after it; -1: without end
    after: int
    first: int  # so many keys at the front are seen from everywhere
    ordered: bool  # whole texts: places follow from slots
    even: bool  # whole texts of whole tiles: none has an end inside
    cap: bool
    bias: str  # none, slopes, or a line of numbers, one a distance
    grain: int  # tokens of a tile for which bounds are given
    sinks: bool = False
    statistics: bool = False
    learned: bool = False  # is the line to be given a gradient?


@triton.jit
def capped(products, inner, FORM: tl.constexpr):
    """tanh of the products by one power of two: tanh(x) = 1 - 2 / (1 + e^2x), inner = 2 · log₂ e · scale / cap."""
    if FORM.cap:
        products = 1 - 2 / (1 + tl.exp2(products * inner))
    return products


@triton.jit
def bias_of(Bias, head, reach, FORM: tl.constexpr):
    """A head's slope, or where its line begins."""
    if FORM.bias == "slopes":
        return tl.load(Bias + head) * LOG2E
    else:
        return Bias + head * (2 * reach + 1)


@triton.jit
def biased(s, q_at, k_at, bias, reach, FORM: tl.constexpr):
    """Scores with -slope · distance, or with what the line says for the distance."""
    if FORM.bias == "slopes":
        s -= bias * tl.abs(k_at.to(tl.float32) - q_at.to(tl.float32))
    elif FORM.bias == "line":
        s += LOG2E * tl.load(bias + on_line(q_at, k_at, reach))
    return s


@triton.jit
def on_line(q_at, k_at, reach):
    return tl.minimum(tl.maximum(k_at - q_at, -reach), reach) + reach


@triton.jit
def seen(q_at, k_at, q_document, k_document, FORM: tl.constexpr):
    """Which pairs are seen: of one document, near enough or with the key among the first."""
    pairs = q_document == k_document
    if FORM.after >= 0:
        pairs = pairs & (k_at - q_at <= FORM.after)
    if FORM.before >= 0:
        near = q_at - k_at <= FORM.before
        if FORM.first > 0:
            near = near | (k_at < FORM.first)
        pairs = pairs & near
    return pairs


@triton.jit
def places(At, Document, start, length, SIZE: tl.constexpr, FORM: tl.constexpr):
    """Position and document of the tokens from `start` on; nowhere behind the last."""
    slot = start + tl.arange(0, SIZE)
    if FORM.even:
        return slot, tl.zeros_like(slot)
    elif FORM.ordered:
        return slot, tl.where(slot < length, 0, NOWHERE)
    else:
        inside = slot < length
        return tl.load(At + slot, mask=inside, other=0), tl.load(Document + slot, mask=inside, other=NOWHERE)


@triton.jit
def span(start, SIZE: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr, length, STEP: tl.constexpr):
    """Of a whole text, what the tile of `start` meets on the other side: lo … hi, and every pair of it from … to.

    Each of the SIZE tokens meets those from BEFORE before it to AFTER after it.
    """
    lo, hi, full_lo, full_hi = 0, length, 0, length // STEP * STEP
    if BEFORE >= 0:
        lo = tl.maximum(start - BEFORE, 0) // STEP * STEP
        full_lo = tl.cdiv(tl.maximum(start + SIZE - 1 - BEFORE, 0), STEP) * STEP
    if AFTER >= 0:
        hi = tl.minimum(start + SIZE + AFTER, length)
        full_hi = tl.minimum(full_hi, (start + AFTER + 1) // STEP * STEP)
    full_lo = tl.minimum(full_lo, hi)
    return lo, full_lo, tl.maximum(full_hi, full_lo), hi


@triton.jit
def bounds_of(Bounds, tile):
    """The same four for other texts, as bounds.py found them."""
    Bounds += tile * 4
    return tl.load(Bounds), tl.load(Bounds + 1), tl.load(Bounds + 2), tl.load(Bounds + 3)


@triton.jit
def my_tile(length, SIZE: tl.constexpr):
    """Which tile of its head this program takes, and which head of all: tiles side by side share what they read."""
    tiles = tl.cdiv(length, SIZE)
    return tl.program_id(0) % tiles, tl.program_id(0) // tiles


@triton.jit
def load_rows(X, b, h, start, ROWS: tl.constexpr, WIDE: tl.constexpr):
    """(ROWS, WIDE) of a head from row `start` on, zeros where it has no such row or column."""
    return X.load([b, h, start, 0]).reshape(ROWS, WIDE)


@triton.jit
def store_rows(X, x, b, h, start, ROWS: tl.constexpr, WIDE: tl.constexpr):
    """Of (ROWS, WIDE) what the head has rows and columns for."""
    X.store([b, h, start, 0], x.to(X.dtype).reshape(1, 1, ROWS, WIDE))
