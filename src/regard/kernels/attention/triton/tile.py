"""From a tile of products q·k to scores: cap, bias and mask, the same for forward and backward.

Scores are in units of log 2, so that weights are powers of two: exp(s) = 2^(s · log₂ e), and the scale times log₂ e is
one `factor`. With a cap c the product is replaced by tanh(scale · q·k / c), and the factor is c · log₂ e.

Positions and documents have shapes (M, 1) for queries and (1, N) for keys, or (1, M) and (N, 1) where the backward has
keys first.
"""

from typing import NamedTuple

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
MASKED = tl.constexpr(-1e30)  # a masked score; finite, so that no row becomes NaN
LOWEST = tl.constexpr(-1e20)  # the initial maximum of a row; far above MASKED, so that masked keys have weight 0
NO_DOCUMENT = tl.constexpr(-(2**31))  # document of an invalid key


class TileConfig(NamedTuple):
    """Compile-time constants of the kernels."""

    queries: int  # per tile
    keys: int
    key_dim: int  # of queries and keys, rounded up to a power of two
    value_dim: int
    before: int  # largest allowed distance of a key before the query, and after it; -1: no limit
    after: int
    first: int  # number of first tokens that every query attends to
    ordered: bool  # whole sequences: positions are slots
    full_tiles: bool  # ordered, and all tiles are full
    cap: bool
    bias: str  # "none", "slopes", or "offsets": one number per offset
    bounds_tile: int  # tokens per tile of the bounds
    sinks: bool = False
    statistics: bool = False
    learned: bool = False  # whether the offsets need a gradient


@triton.jit
def apply_cap(products, tanh_factor, CONFIG: tl.constexpr):
    """tanh of the products with one exp2: tanh(x) = 1 - 2 / (1 + e^2x), tanh_factor = 2 · log₂ e · scale / cap."""
    if CONFIG.cap:
        products = 1 - 2 / (1 + tl.exp2(products * tanh_factor))
    return products


@triton.jit
def head_bias(Bias, head, max_distance, CONFIG: tl.constexpr):
    """The slope of a head, or a pointer to its offsets."""
    if CONFIG.bias == "slopes":
        return tl.load(Bias + head) * LOG2E
    else:
        return Bias + head * (2 * max_distance + 1)


@triton.jit
def add_bias(s, q_positions, k_positions, bias, max_distance, CONFIG: tl.constexpr):
    """Add -slope · distance, or the bias of the offset, to the scores."""
    if CONFIG.bias == "slopes":
        s -= bias * tl.abs(k_positions.to(tl.float32) - q_positions.to(tl.float32))
    elif CONFIG.bias == "offsets":
        s += LOG2E * tl.load(bias + offset_index(q_positions, k_positions, max_distance))
    return s


@triton.jit
def offset_index(q_positions, k_positions, max_distance):
    return tl.minimum(tl.maximum(k_positions - q_positions, -max_distance), max_distance) + max_distance


@triton.jit
def is_allowed(q_positions, k_positions, q_document, k_document, CONFIG: tl.constexpr):
    """True for pairs of one document, within the allowed distances or with one of the first tokens as key."""
    pairs = q_document == k_document
    if CONFIG.after >= 0:
        pairs = pairs & (k_positions - q_positions <= CONFIG.after)
    if CONFIG.before >= 0:
        near = q_positions - k_positions <= CONFIG.before
        if CONFIG.first > 0:
            near = near | (k_positions < CONFIG.first)
        pairs = pairs & near
    return pairs


@triton.jit
def load_positions(Positions, Document, start, length, SIZE: tl.constexpr, CONFIG: tl.constexpr):
    """Positions and documents of the tokens from `start` on; NO_DOCUMENT after the last one."""
    slot = start + tl.arange(0, SIZE)
    if CONFIG.full_tiles:
        return slot, tl.zeros_like(slot)
    elif CONFIG.ordered:
        return slot, tl.where(slot < length, 0, NO_DOCUMENT)
    else:
        inside = slot < length
        return tl.load(Positions + slot, mask=inside, other=0), tl.load(Document + slot, mask=inside, other=NO_DOCUMENT)


@triton.jit
def ordered_bounds(start, SIZE: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr, length, STEP: tl.constexpr):
    """The bounds of bounds.py, lo, full_lo, full_hi and hi, of the tile at `start` of an ordered layout.

    Each of its SIZE tokens has allowed pairs with the tokens from BEFORE tokens before it to AFTER tokens after it.
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
def load_bounds(Bounds, b, start, length, CONFIG: tl.constexpr):
    """The bounds of bounds.py for the tile at `start` of row b."""
    Bounds += (b * tl.cdiv(length, CONFIG.bounds_tile) + start // CONFIG.bounds_tile) * 4
    return tl.load(Bounds), tl.load(Bounds + 1), tl.load(Bounds + 2), tl.load(Bounds + 3)


@triton.jit
def program_tile(length, SIZE: tl.constexpr):
    """The tile of this program, and its head among the heads of all rows. Consecutive programs share keys."""
    tiles = tl.cdiv(length, SIZE)
    return tl.program_id(0) % tiles, tl.program_id(0) // tiles


@triton.jit
def load_rows(X, b, h, start, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """(ROWS, WIDTH) of a head from row `start` on; zeros outside of it."""
    return X.load([b, h, start, 0]).reshape(ROWS, WIDTH)


@triton.jit
def store_rows(X, x, b, h, start, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Store (ROWS, WIDTH) from row `start` on, without the rows and columns that are outside of the head."""
    X.store([b, h, start, 0], x.to(X.dtype).reshape(1, 1, ROWS, WIDTH))
