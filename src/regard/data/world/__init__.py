"""A simulated world: short stories from a seeded simulation, with questions and their correct answers.

`story(seed, level, split)` is a pure function. The split of a story depends on a hash of its events, not of its
wording: attempts are drawn until the events belong to the requested split, so that no held-out story can occur in
training in other words. `regard.data.world.tasks` has examples of the same worlds for each kind of training.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from random import Random

from regard.data.world.english import Event, write_sentences
from regard.data.world.levels import LEVELS
from regard.data.world.questions import Question, draw_questions
from regard.data.world.simulation import World, simulate

__all__ = [
    "EVALUATION_SEED",
    "LEVELS",
    "SPLITS",
    "Event",
    "Question",
    "Story",
    "draw_worlds",
    "split_of",
    "stories",
    "story",
]

SPLITS = ("train", "held-out")
EVALUATION_SEED = 1 << 50  # the first seed of evaluations; no training run reaches it


@dataclass(frozen=True)
class Story:
    events: tuple[Event, ...]
    sentences: tuple[str, ...]
    questions: tuple[Question, ...]

    @property
    def text(self) -> str:
        return " ".join(self.sentences)


def split_of(events: list[Event]) -> str:
    """The split that a story with these events belongs to; one in eight is held out."""
    lines = "\n".join("|".join(event) for event in events)
    return "held-out" if blake2b(lines.encode(), digest_size=1).digest()[0] < 32 else "train"


def draw_worlds(seed: int, level: int = 1, split: str = "train") -> Iterator[tuple[World, Random]]:
    """An endless iterator of the worlds of this seed in this split, each with the generator that drew it."""
    if level not in LEVELS:
        raise ValueError(f"level={level} is not a level of the world; choose one of {', '.join(map(str, LEVELS))}")
    if split not in SPLITS:
        raise ValueError(f"split={split!r} is not a split; choose one of {', '.join(SPLITS)}")
    for attempt in count():
        rng = Random(f"{level}/{seed}/{attempt}")
        world = simulate(LEVELS[level], rng)
        if split_of(world.events) == split:
            yield world, rng


def story(seed: int, level: int = 1, split: str = "train") -> Story:
    world, rng = next(draw_worlds(seed, level, split))
    sentences = write_sentences(world.events, rng)
    return Story(tuple(world.events), tuple(sentences), tuple(draw_questions(world, LEVELS[level], rng)))


def stories(level: int = 1, split: str = "train", start: int = 0) -> Iterator[Story]:
    """An endless iterator of stories, with the seeds `start`, `start` + 1, …"""
    return (story(seed, level, split) for seed in count(start))
