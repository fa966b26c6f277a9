"""FLOPs of a forward by part, and the number of query-key pairs, which determines the FLOPs of attention.

    FLOPs                 2 per multiply-add of a matrix product; attention 4·E per pair and head (scores, values)
    pairs                 full n²        causal n(n+1)/2        causal window of w  w(w+1)/2 + (n-w)·w
    generating n tokens   n(n+1)/2 pairs with a cache           n(n+1)(2n+1)/6 without one

A masked product counts in full, as PyTorch's counter does, except that no query attends to more keys than its mask
allows (`Body.max_keys`). For an encoder only the blocks are counted, not its input and head. L layers with a window of
w, the token itself included, reach L(w-1)+1 tokens; earlier tokens cannot influence the output.
"""

from collections import Counter

import torch

from regard.kernels.attention.mask import Mask
from regard.models.base import Model
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.parts.body import Body
from regard.planning.parameters import all_bodies, bodies

MAX_KEYS = 2**50  # attention_equals_rest does not search further


def body_flops(body: Body, width: int, tokens: int, keys: int) -> int:
    """FLOPs of one forward of `tokens` queries, each of which attends to `keys` keys or as many as its mask allows."""
    return body.flops(width, tokens, keys if body.max_keys is None else min(keys, body.max_keys))


def flops_by_part(stack: Decoder | Encoder, tokens: int, keys: int) -> dict[str, int]:
    """FLOPs of one forward. Those that grow with the number of keys have separate entries, "KIND, pairs"."""
    counts = Counter()
    for body in bodies(stack):
        without_keys = body_flops(body, stack.width, tokens, 0)
        counts[body.kind] += without_keys
        counts[f"{body.kind}, pairs"] += body_flops(body, stack.width, tokens, keys) - without_keys
    counts["embedding"] = 2 * tokens * embedding_projection_size(stack)
    if isinstance(stack, Decoder):
        counts["head"] = head_flops(stack, tokens)
    return {part: number for part, number in counts.items() if number}


def head_flops(decoder: Decoder, tokens: int) -> int:
    return 2 * tokens * (decoder.table_dim * decoder.vocab + embedding_projection_size(decoder))


def embedding_projection_size(stack: Decoder | Encoder) -> int:
    """The number of weights of the projection between an embedding and a stack of different widths."""
    return 0 if stack.embedding_dim is None else stack.embedding_dim * stack.width


def ahead_flops(decoder: Decoder, tokens: int, keys: int) -> int:
    """FLOPs of the blocks that predict tokens further ahead, each with a head."""
    ahead = [body_flops(s.body, decoder.width, tokens, keys) for block in decoder.ahead for s in block.sublayers]
    return sum(ahead) + len(decoder.ahead) * head_flops(decoder, tokens)


def attention_equals_rest(spec: Model) -> int | None:
    """The smallest number of keys at which attention costs at least as much as the rest of the blocks; None: never.

    In a standard block, attention to n keys takes 4nD FLOPs per token and the rest 24D², so the result is 6D. A causal
    query attends to half of the sequence on average, so the sequence is then twice as long. The head is not counted.
    """

    def flops(keys: int) -> int:
        return sum(body_flops(body, width, 1, keys) for body, width in all_bodies(spec))

    rest, low, high = flops(0), 0, 1
    while flops(high) < 2 * rest:
        low, high = high, 2 * high
        if high > MAX_KEYS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if flops(middle) >= 2 * rest else (middle, high)
    return high


def full_pairs(length: int) -> int:
    return length * length


def causal_pairs(length: int) -> int:
    return length * (length + 1) // 2


def window_pairs(length: int, window: int) -> int:
    """Pairs of a causal window, which counts the token itself."""
    inside = min(length, window)
    return causal_pairs(inside) + (length - inside) * window


def mask_pairs(mask: Mask, length: int, rows: int = 1024) -> int:
    """Pairs that a mask allows, counted by n² comparisons, `rows` queries at a time."""
    positions, pairs = torch.arange(length), 0
    for queries in positions.split(rows):
        allowed = mask.allows(queries.unsqueeze(-1), positions)  # (rows, n)
        pairs += len(queries) * length if allowed is None else int(allowed.sum())
    return pairs


def window_reach(layers: int, window: int) -> int:
    """The number of tokens, the token itself included, that can influence a token through this many layers."""
    return layers * (window - 1) + 1


def pair_flops(pairs: int, head_dim: int, value_dim: int | None = None) -> int:
    """FLOPs of one head: the score q·k and the weighted value of every pair."""
    return 2 * pairs * (head_dim + (head_dim if value_dim is None else value_dim))


def linear_crossover(features: int, head_dim: int, value_dim: int | None = None) -> float:
    """The length n at which the 2n(E + Ev) FLOPs per token of full attention equal linear attention's 4·r·Ev.

    features: r, the dimension of the feature map.
    """
    value_dim = head_dim if value_dim is None else value_dim
    return 2 * features * value_dim / (head_dim + value_dim)


def cached_pairs(length: int) -> int:
    """Pairs computed to generate `length` tokens with a cache: t pairs in step t."""
    return causal_pairs(length)


def uncached_pairs(length: int) -> int:
    """Pairs computed to generate `length` tokens without a cache: step t recomputes the prefix, t² pairs."""
    return length * (length + 1) * (2 * length + 1) // 6


def uncached_projections(length: int) -> int:
    """Keys (and as many values) computed to generate `length` tokens without a cache; with a cache, `length`."""
    return length * (length + 1) // 2


def decode_pairs(prompt: int, new: int) -> int:
    """Pairs computed to generate `new` tokens after a cached prompt."""
    return prompt * new + new * (new + 1) // 2
