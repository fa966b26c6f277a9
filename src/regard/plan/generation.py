"""Pairs of attention in writing a text token by token, with and without a cache.

    step t        t pairs with a cache          t² without (the whole prefix is read again)
    n steps       n(n+1)/2                      n(n+1)(2n+1)/6

Keys and values are computed for n tokens against n(n+1)/2. After a prompt of n, T more cost nT + T(T+1)/2 pairs.
"""


def cached_pairs(length: int) -> int:
    return length * (length + 1) // 2


def uncached_pairs(length: int) -> int:
    """Each step reads its whole prefix, all pairs of it."""
    return length * (length + 1) * (2 * length + 1) // 6


def uncached_projections(length: int) -> int:
    """Tokens whose key and value are computed; with a cache it is `length`."""
    return length * (length + 1) // 2


def decode_pairs(prompt: int, new: int) -> int:
    """Of `new` tokens written after a prompt, each before all that stands before it and itself."""
    return prompt * new + new * (new + 1) // 2
