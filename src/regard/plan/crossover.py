"""Lengths at which one cost overtakes another.

    attention = rest      a token's products with n keys cost what all else in the blocks does: 4nD = 24D², n = 6D
    cache = weights       a text so long, or so many texts, that what they remember outweighs the model

Below the first a cheaper attention buys little. In a causal text a token sees half the keys on average, so there it is
twice as long. The head, outside the blocks, is left out.
"""

from collections.abc import Callable

from regard.plan.parts import Planned, all_bodies, flops

LONGEST = 2**50


def attention_equals_rest(spec: Planned) -> int | None:
    """Keys from which on attention costs no less than the rest of the blocks; None: it never does."""

    def cost(seen: int) -> int:
        return sum(flops(body, width, 1, seen) for body, width in all_bodies(spec))

    rest = cost(0)
    return least(lambda seen: cost(seen) >= 2 * rest)


def least(holds: Callable[[int], bool]) -> int | None:
    """The least number from which on a growing condition holds."""
    low, high = 0, 1
    while not holds(high):
        low, high = high, 2 * high
        if high > LONGEST:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def tokens_as_heavy(weight_bytes: int, bytes_per_token: int) -> int | None:
    """Tokens of cache up to which it is lighter than the weights; None: nothing is kept for a token."""
    return weight_bytes // bytes_per_token if bytes_per_token else None


def texts_as_heavy(weight_bytes: int, bytes_per_token: int, context: int) -> int | None:
    """Texts of this length whose cache first outweighs the weights."""
    return weight_bytes // (bytes_per_token * context) + 1 if bytes_per_token else None
