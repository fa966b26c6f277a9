"""What attention costs by its length: pairs of a query and a key, products, bytes, and how far a window reaches.

    full  n²        causal  n(n+1)/2        causal window of w  w(w+1)/2 + (n-w)·w        scores and blend  4·E a pair

A pair is not an operation: at a million tokens 10¹² pairs are 5·10¹⁴ FLOPs for a head of 128. A window of w counts the
token itself, so L layers of it reach L(w-1)+1 tokens: how far influence can travel, not what a model can recall.
"""

import torch

from regard.kernels.attention.mask import Mask


def full_pairs(length: int) -> int:
    return length * length


def causal_pairs(length: int) -> int:
    return length * (length + 1) // 2


def mask_pairs(mask: Mask, length: int, rows: int = 1024) -> int:
    """Pairs that any mask lets through, counted: n² questions, a stretch of rows at a time."""
    places, pairs = torch.arange(length), 0
    for queries in places.split(rows):
        seen = mask.allows(queries.unsqueeze(-1), places)
        pairs += len(queries) * length if seen is None else int(seen.sum())
    return pairs


def window_pairs(length: int, window: int) -> int:
    """Causal, each token before itself and the window - 1 tokens behind it."""
    inside = min(length, window)
    return causal_pairs(inside) + (length - inside) * window


def window_reach(layers: int, window: int) -> int:
    """Tokens, itself counted, whose change can reach a token through this many layers."""
    return layers * (window - 1) + 1


def pair_flops(pairs: int, head_dim: int, value_dim: int | None = None) -> int:
    """Of one head: q·k, and the weight times the value, a multiply and an add each."""
    return 2 * pairs * (head_dim + (head_dim if value_dim is None else value_dim))


def score_bytes(length: int, heads: int = 1, itemsize: int = 2) -> int:
    """Of the whole matrix of scores, held at once: one layer's."""
    return heads * length * length * itemsize


def linear_crossover(features: int, head_dim: int, value_dim: int | None = None) -> float:
    """Length at which full attention's 2n(E + Ev) a token equals the 4·r·Ev of a state: r features when Ev = E."""
    value_dim = head_dim if value_dim is None else value_dim
    return 2 * features * value_dim / (head_dim + value_dim)
