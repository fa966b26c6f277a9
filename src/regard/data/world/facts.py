"""True and false facts about the final state of a world, each as a yes/no question and as a statement.

A false fact names a plausible alternative where there is one: a place that the person has left, a person who had the
thing earlier. Whether two names occur in the same sentence therefore does not decide the answer.
"""

from collections.abc import Callable, Iterator
from random import Random
from typing import NamedTuple

from regard.data.world.english import FEELINGS, INDOORS
from regard.data.world.levels import Level
from regard.data.world.simulation import World


class Fact(NamedTuple):
    question: str
    statement: str
    truth: bool


def person_in(world: World, rng: Random) -> Iterator[Fact]:
    for person in world.people:
        for place, truth in with_alternative(world, rng, person, world.at[person], world.places):
            yield Fact(f"Is {person} in the {place}?", f"{person} is in the {place}.", truth)


def thing_in(world: World, rng: Random) -> Iterator[Fact]:
    for thing in remaining_things(world):
        for place, truth in with_alternative(world, rng, thing, world.place(thing), world.places):
            yield Fact(f"Is the {thing} in the {place}?", f"The {thing} is in the {place}.", truth)


def person_has(world: World, rng: Random) -> Iterator[Fact]:
    for thing in remaining_things(world):
        if (holder := world.at[thing]) in world.people:
            for person, truth in with_alternative(world, rng, thing, holder, world.people):
                yield Fact(f"Does {person} have the {thing}?", f"{person} has the {thing}.", truth)


def person_wet(world: World, rng: Random) -> Iterator[Fact]:
    for person in world.people:
        yield Fact(f"Is {person} wet?", f"{person} is wet.", person in world.wet)


def lamp_on(world: World, rng: Random) -> Iterator[Fact]:
    for place in world.places:
        if place in INDOORS:
            yield Fact(f"Is the lamp in the {place} on?", f"The lamp in the {place} is on.", place in world.lit)


def person_feels(world: World, rng: Random) -> Iterator[Fact]:
    for person, feeling in world.feeling.items():
        for adjective, truth in with_alternative(world, rng, person, feeling, FEELINGS):
            yield Fact(f"Is {person} {adjective}?", f"{person} is {adjective}.", truth)


FACTS: dict[str, Callable[[World, Random], Iterator[Fact]]] = {
    "is in": person_in, "thing in": thing_in, "has": person_has, "wet": person_wet, "bright": lamp_on,
    "feels": person_feels,
}  # fmt: skip
FACTS_OF_ALL_LEVELS = ("is in", "thing in", "has")


def with_alternative(
    world: World, rng: Random, subject: str, value: str, choices: list[str] | tuple[str, ...]
) -> Iterator[tuple[str, bool]]:
    """The true value, and a false one: if possible named in an event with the subject, or at least in the story."""
    others = [other for other in choices if other != value]
    in_story = [other for other in others if any(other in event for event in world.events)]
    with_subject = [other for other in in_story if any({subject, other} <= {*event} for event in world.events)]
    yield value, True
    yield rng.choice(with_subject or in_story or others), False


def remaining_things(world: World) -> list[str]:
    """The things that were not eaten."""
    return [thing for thing in world.things if thing in world.at]


def draw_fact(world: World, level: Level, rng: Random) -> Fact:
    """A fact that is true with probability 1/2, of a random kind of which both true and false facts exist."""
    kinds = [kind for kind in FACTS if kind in FACTS_OF_ALL_LEVELS or kind in level.kinds]
    by_kind = [list(FACTS[kind](world, rng)) for kind in kinds]
    truth = rng.random() < 0.5
    facts = rng.choice([facts for facts in by_kind if len({fact.truth for fact in facts}) == 2])
    return rng.choice([fact for fact in facts if fact.truth == truth])
