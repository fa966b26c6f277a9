"""A small world: a seeded simulation that tells short stories and knows the answers to questions about them.

`story(seed, level, split)` is a pure function. The split of a story is decided by a hash of its facts (the events,
whatever the wording): seeds are tried onward until the facts fall on the side asked for, so that no story of the
held-out split, however told, can occur in training.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from random import Random

from regard.data.world.ask import Question, ask
from regard.data.world.levels import LEVELS
from regard.data.world.simulate import Event, simulate
from regard.data.world.tell import tell

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
    """One story in eight is held out."""
    facts = "\n".join("|".join(event) for event in events)
    return "held-out" if blake2b(facts.encode(), digest_size=1).digest()[0] < 32 else "train"


def story(seed: int, level: int = 1, split: str = "train") -> Story:
    if level not in LEVELS:
        raise ValueError(f"level={level} is not a level of the world; choose one of {', '.join(map(str, LEVELS))}")
    if split not in SPLITS:
        raise ValueError(f"split={split!r} is not a split; choose one of {', '.join(SPLITS)}")
    settings = LEVELS[level]
    for attempt in count():
        rng = Random(f"{level}/{seed}/{attempt}")
        world = simulate(settings, rng)
        if split_of(world.events) == split:
            return Story(tuple(world.events), tuple(tell(world.events, rng)), tuple(ask(world, settings, rng)))
    raise AssertionError("unreachable: one story in eight is held out")


def stories(level: int = 1, split: str = "train", start: int = 0) -> Iterator[Story]:
    """Stories without end, from seed `start` onward."""
    return (story(seed, level, split) for seed in count(start))
