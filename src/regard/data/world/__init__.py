"""A simulated world: short stories from a seeded simulation, with questions and their correct answers.

`story(seed, level, split)` is a pure function. The split of a story depends on a hash of its events, not of its
wording: attempts are drawn until the events belong to the requested split, so that no held-out story can occur in
training in other words.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from random import Random

from regard.data.world.english import Event, write_sentences
from regard.data.world.levels import LEVELS
from regard.data.world.questions import Question, draw_questions
from regard.data.world.simulation import simulate

__all__ = ["LEVELS", "SPLITS", "Event", "Question", "Story", "split_of", "stories", "story"]

SPLITS = ("train", "held-out")


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


def story(seed: int, level: int = 1, split: str = "train") -> Story:
    if level not in LEVELS:
        raise ValueError(f"level={level} is not a level of the world; choose one of {', '.join(map(str, LEVELS))}")
    if split not in SPLITS:
        raise ValueError(f"split={split!r} is not a split; choose one of {', '.join(SPLITS)}")
    config = LEVELS[level]
    for attempt in count():
        rng = Random(f"{level}/{seed}/{attempt}")
        world = simulate(config, rng)
        if split_of(world.events) == split:
            sentences = write_sentences(world.events, rng)
            return Story(tuple(world.events), tuple(sentences), tuple(draw_questions(world, config, rng)))
    raise AssertionError("unreachable: one story in eight is held out")


def stories(level: int = 1, split: str = "train", start: int = 0) -> Iterator[Story]:
    """An endless iterator of stories, with the seeds `start`, `start` + 1, …"""
    return (story(seed, level, split) for seed in count(start))
