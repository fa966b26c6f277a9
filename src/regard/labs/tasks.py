"""Synthetic tasks with one parameter for their difficulty. Each returns a batch of random sequences.

Token 0 is filler and token 1 a query; the others are symbols. Only tokens that can be predicted have a weight.
"""

import torch
from torch import Tensor

from regard.data.batch import Batch

FILLER, QUERY, FIRST = 0, 1, 2  # FIRST is the id of the first symbol


def whole_rows(tokens: Tensor, targets: Tensor, weights: Tensor) -> Batch:
    """A batch in which every row is one sequence; all (B, L)."""
    rows, length = tokens.shape
    return Batch(
        tokens=tokens,
        targets=targets,
        weights=weights.float(),
        positions=torch.arange(length).expand(rows, length),
        segments=torch.zeros(rows, length, dtype=torch.int64),
    )


def draw_symbols(rng: torch.Generator, symbols: int, *shape: int) -> Tensor:
    return torch.randint(FIRST, FIRST + symbols, shape, generator=rng)


def recall_after_gap(rng: torch.Generator, gap: int, rows: int = 32, symbols: int = 16) -> Batch:
    """A symbol, `gap` others, then a query whose target is the first symbol."""
    tokens = draw_symbols(rng, symbols, rows, gap + 2)
    tokens[:, -1] = QUERY
    targets = tokens.clone()
    targets[:, -1] = tokens[:, 0]
    weights = torch.zeros(rows, gap + 2)
    weights[:, -1] = 1
    return whole_rows(tokens, targets, weights)


def associative_recall(rng: torch.Generator, pairs: int, rows: int = 32, symbols: int = 64) -> Batch:
    """Pairs of key and value, then every key again in random order; its value is the target.

    Keys are from the first half of the symbols and distinct within a row; values are from the second half.
    """
    half = symbols // 2
    assert pairs <= half, f"{pairs} different keys cannot be drawn from {half}"
    keys = torch.rand(rows, half, generator=rng).argsort(1)[:, :pairs] + FIRST  # (B, pairs)
    values = torch.randint(FIRST + half, FIRST + symbols, (rows, pairs), generator=rng)
    order = torch.rand(rows, pairs, generator=rng).argsort(1)
    return pairs_and_queries(keys, values, order)


def pairs_and_queries(keys: Tensor, values: Tensor, order: Tensor) -> Batch:
    """The pairs, then the pairs again in another order, where the values are targets. All (B, pairs)."""
    pairs = torch.stack([keys, values], -1).flatten(1)  # (B, 2 · pairs)
    queries = torch.stack([keys.gather(1, order), values.gather(1, order)], -1).flatten(1)
    tokens = torch.cat([pairs, queries], 1)  # (B, 4 · pairs)
    targets = tokens.roll(-1, 1)
    weights = torch.zeros_like(tokens)
    weights[:, pairs.shape[1] :: 2] = 1
    return whole_rows(tokens, targets, weights)


def selective_copying(rng: torch.Generator, memorised: int, length: int, rows: int = 32, symbols: int = 16) -> Batch:
    """Symbols at random positions among filler, to be repeated in order at the end (Gu & Dao 2023)."""
    positions = torch.rand(rows, length, generator=rng).argsort(1)[:, :memorised].sort(1).values
    return copying(draw_symbols(rng, symbols, rows, memorised), positions, length)


def plain_copying(rng: torch.Generator, memorised: int, length: int, rows: int = 32, symbols: int = 16) -> Batch:
    """The same with the symbols at fixed positions: first, followed by filler."""
    positions = torch.arange(memorised).expand(rows, memorised)
    return copying(draw_symbols(rng, symbols, rows, memorised), positions, length)


def copying(symbols: Tensor, positions: Tensor, length: int) -> Batch:
    """Symbols (B, memorised) at these positions among `length` tokens, followed by a query for each of them."""
    rows, memorised = symbols.shape
    source = torch.full((rows, length), FILLER).scatter(1, positions, symbols)
    tokens = torch.cat([source, torch.full((rows, memorised), QUERY)], 1)
    targets = torch.cat([source, symbols], 1)
    weights = torch.cat([torch.zeros(rows, length), torch.ones(rows, memorised)], 1)
    return whole_rows(tokens, targets, weights)


def encoder_decoder_batch(source: Tensor, target: Tensor) -> Batch:
    """For an encoder-decoder, which reads the whole source before it generates the target."""
    shifted = torch.cat([torch.full_like(target[:, :1], QUERY), target[:, :-1]], 1)
    return Batch(source=source, **whole_rows(shifted, target, torch.ones_like(target)))


def decoder_batch(source: Tensor, target: Tensor) -> Batch:
    """For a decoder, which has one output per token of the source: the last of them are the target."""
    offset = source.shape[1] - target.shape[1]
    targets = torch.cat([source[:, :offset], target], 1)
    weights = (torch.arange(source.shape[1]) >= offset).expand_as(source)
    return whole_rows(source, targets, weights)
