"""Pairs of a source and a target in words, from passages of the small world, for labs that compare models on them.

translation     Tom grabbed the doll Mary went to the attic  ->  retun fupulo Lomut meduk mokule Kulo
summary         the same                                     ->  take Tom doll move Mary attic
continuation    Tom grabbed the doll                         ->  Mary went to the attic
"""

from collections.abc import Sequence

import numpy as np
import torch

from regard.data.batch import Batch
from regard.data.packing import pad_items
from regard.data.world.english import write_sentences
from regard.data.world.second_language import translate
from regard.data.world.tasks import draw_passages
from regard.labs.alignment import SentencePair, split_words

START, END, FIRST = 0, 1, 2  # ids; FIRST is the first word's
TASKS = ("translation", "summary", "continuation")
LEVEL = 2
IdPair = tuple[list[int], list[int]]


def read_passages(split: str, count: int) -> dict[str, list[SentencePair]]:
    """The pairs of each task, for passages of two sentences; each pair once."""
    found: dict[str, dict[str, SentencePair]] = {task: {} for task in TASKS}
    for seed in range(count):
        events, rng = next(draw_passages(seed, LEVEL, split))
        first, second = write_sentences(events, rng)
        text = f"{first} {second}"
        short = [name for event in events for name in (event.verb, event.who, event.what, event.where) if name]
        targets = (split_words(translate(text)), short, split_words(second))
        for task, target in zip(TASKS, targets, strict=True):
            source = split_words(first if task == "continuation" else text)
            found[task][" ".join([*source, "=", *target])] = (source, target)
    return {task: list(pairs.values()) for task, pairs in found.items()}


def to_ids(train: list[SentencePair], held_out: list[SentencePair]) -> tuple[list[IdPair], list[IdPair], int]:
    """Both with words as ids, and the size of the vocabulary. Held-out pairs with words that are new are left out."""
    words = sorted({word for pair in train for side in pair for word in side})
    ids = {word: FIRST + i for i, word in enumerate(words)}
    known = [pair for pair in held_out if all(word in ids for side in pair for word in side)]
    encoded = [[([ids[w] for w in source], [ids[w] for w in target]) for source, target in pairs]
               for pairs in (train, known)]  # fmt: skip
    return encoded[0], encoded[1], FIRST + len(words)


def draw(rng: torch.Generator, pairs: Sequence[IdPair], rows: int) -> list[IdPair]:
    return [pairs[i] for i in torch.randint(len(pairs), (rows,), generator=rng).tolist()]


def concatenated(pairs: Sequence[IdPair], weigh_source: bool = False) -> Batch:
    """For a decoder: source, START, target, of which the target and END are predicted, or the source too."""
    items = []
    for source, target in pairs:
        tokens = np.array([*source, START, *target, END])
        weights = np.ones(len(tokens) - 1)
        weights[: len(source)] = weigh_source
        items.append({"tokens": tokens[:-1], "targets": tokens[1:], "weights": weights})
    (tokens, valid), (targets, _), (weights, _) = (pad_items(items, name) for name in ("tokens", "targets", "weights"))
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    return Batch(
        tokens=tokens,
        targets=targets,
        weights=weights.float(),
        positions=positions.where(valid, 0),
        segments=valid.long() - 1,
    )
