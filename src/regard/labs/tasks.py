"""Tasks whose difficulty is one dial. Each gives a batch of fresh random texts; only tokens that can be known count.

Token 0 is filler, 1 asks; the rest are symbols.
"""

import torch
from torch import Tensor

from regard.data.batch import Batch

FILLER, ASK, FIRST = 0, 1, 2


def texts(tokens: Tensor, targets: Tensor, weights: Tensor) -> Batch:
    """Whole texts, a row each."""
    rows, length = tokens.shape
    return Batch(
        tokens=tokens,
        targets=targets,
        weights=weights.float(),
        positions=torch.arange(length).expand(rows, length),
        segments=torch.zeros(rows, length, dtype=torch.int64),
    )


def draw(draws: torch.Generator, high: int, *shape: int) -> Tensor:
    """Symbols, of which there are `high`."""
    return torch.randint(FIRST, FIRST + high, shape, generator=draws)


def recall_after_gap(draws: torch.Generator, gap: int, rows: int = 32, symbols: int = 16) -> Batch:
    """A symbol, then `gap` others, then the question which one stood first."""
    tokens = draw(draws, symbols, rows, gap + 2)
    tokens[:, -1] = ASK
    targets = tokens.clone()
    targets[:, -1] = tokens[:, 0]
    weights = torch.zeros(rows, gap + 2)
    weights[:, -1] = 1
    return texts(tokens, targets, weights)


def associative_recall(draws: torch.Generator, pairs: int, rows: int = 32, symbols: int = 64) -> Batch:
    """Key, value, key, value … then every key again in another order; its value is to be known.

    Keys are the first half of the symbols and differ within a text; values are of the other half.
    """
    half = symbols // 2
    assert pairs <= half, f"{pairs} different keys cannot be drawn from {half}"
    keys = torch.rand(rows, half, generator=draws).argsort(1)[:, :pairs] + FIRST  # (B, pairs)
    values = torch.randint(FIRST + half, FIRST + symbols, (rows, pairs), generator=draws)
    order = torch.rand(rows, pairs, generator=draws).argsort(1)
    return told_and_asked(keys, values, order)


def told_and_asked(keys: Tensor, values: Tensor, order: Tensor) -> Batch:
    """Pairs one after another, then again in another order, where the values are to be known. All (B, pairs)."""
    told = torch.stack([keys, values], -1).flatten(1)  # (B, 2 · pairs)
    asked = torch.stack([keys.gather(1, order), values.gather(1, order)], -1).flatten(1)
    tokens = torch.cat([told, asked], 1)  # (B, 4 · pairs)
    targets = tokens.roll(-1, 1)
    weights = torch.zeros_like(tokens)
    weights[:, told.shape[1] :: 2] = 1
    return texts(tokens, targets, weights)


def selective_copying(draws: torch.Generator, memorised: int, length: int, rows: int = 32, symbols: int = 16) -> Batch:
    """Symbols at random places among filler, to be said again in their order at the end (Gu & Dao 2023)."""
    places = torch.rand(rows, length, generator=draws).argsort(1)[:, :memorised].sort(1).values
    return said_again(draw(draws, symbols, rows, memorised), places, length)


def plain_copying(draws: torch.Generator, memorised: int, length: int, rows: int = 32, symbols: int = 16) -> Batch:
    """The same with the symbols in every text at the same places: first, and filler behind them."""
    places = torch.arange(memorised).expand(rows, memorised)
    return said_again(draw(draws, symbols, rows, memorised), places, length)


def said_again(said: Tensor, places: Tensor, length: int) -> Batch:
    """Symbols (B, memorised) at these places among filler; behind `length` tokens they are asked for."""
    rows, memorised = said.shape
    told = torch.full((rows, length), FILLER).scatter(1, places, said)
    tokens = torch.cat([told, torch.full((rows, memorised), ASK)], 1)
    targets = torch.cat([told, said], 1)
    weights = torch.cat([torch.zeros(rows, length), torch.ones(rows, memorised)], 1)
    return texts(tokens, targets, weights)


def of_source(source: Tensor, target: Tensor) -> Batch:
    """What is to be written of a source, for a model that reads it whole before it writes."""
    begun = torch.cat([torch.full_like(target[:, :1], ASK), target[:, :-1]], 1)
    return Batch(source=source, **texts(begun, target, torch.ones_like(target)))


def while_reading(source: Tensor, target: Tensor) -> Batch:
    """The same for a model with one output a token of the source: the target stands at its end."""
    before = source.shape[1] - target.shape[1]
    targets = torch.cat([source[:, :before], target], 1)
    weights = (torch.arange(source.shape[1]) >= before).expand_as(source)
    return texts(source, targets, weights)
