"""Questions about a world, with the answers that follow from its state.

Each kind of question is a generator of all questions of that kind that have exactly one answer in the world.
"""

from collections.abc import Callable, Iterator
from random import Random
from typing import NamedTuple

from regard.data.world.english import FEELINGS, NUMBERS, OUTDOORS
from regard.data.world.levels import Level
from regard.data.world.simulation import World


class Question(NamedTuple):
    text: str
    answer: str
    kind: str


COMMON_ANSWERS = ("nothing", "nobody", "none")  # so frequent that guesses would often be right, so most are dropped
Pair = tuple[str, str]  # question and answer


def enumeration(names: list[str]) -> str:
    """'the ball, the cup and the key', or 'nothing' for an empty list."""
    nouns = [f"the {name}" for name in names] or ["nothing"]
    return " and ".join(filter(None, (", ".join(nouns[:-1]), nouns[-1])))


def yes_or_no(truth: bool) -> str:
    return "yes" if truth else "no"


def where(world: World, rng: Random) -> Iterator[Pair]:
    for person in world.people:
        yield f"Where is {person}?", f"the {world.at[person]}"


def where_thing(world: World, rng: Random) -> Iterator[Pair]:
    for thing in world.things:
        if thing in world.at:
            yield f"Where is the {thing}?", f"the {world.place(thing)}"


def who_has(world: World, rng: Random) -> Iterator[Pair]:
    for thing in world.things:
        if thing in world.at:
            holder = world.at[thing]
            yield f"Who has the {thing}?", holder if holder in world.people else "nobody"


def what_has(world: World, rng: Random) -> Iterator[Pair]:
    for person in world.people:
        yield f"What does {person} have?", enumeration(world.contents(person))


def how_many(world: World, rng: Random) -> Iterator[Pair]:
    for person in world.people:
        yield f"How many things does {person} have?", NUMBERS[len(world.contents(person))]


def how_many_people(world: World, rng: Random) -> Iterator[Pair]:
    for place in world.places:
        yield f"How many people are in the {place}?", NUMBERS[len(world.company(place))]


def is_in(world: World, rng: Random) -> Iterator[Pair]:
    for person in world.people:
        here = world.at[person]
        elsewhere = rng.choice([place for place in world.places if place != here])
        place = here if rng.random() < 0.5 else elsewhere
        yield f"Is {person} in the {place}?", yes_or_no(place == here)


def inside(world: World, rng: Random) -> Iterator[Pair]:
    for container in world.containers:
        yield f"What is in the {container}?", enumeration(world.contents(container))


def company(world: World, rng: Random) -> Iterator[Pair]:
    for person in world.people:
        others = [other for other in world.company(world.at[person]) if other != person]
        if len(others) < 2:
            yield f"Who is with {person}?", others[0] if others else "nobody"


def _steps(world: World) -> Iterator[tuple[str, str, str]]:
    """(person, from, to) for each move between two places that the person visited only once."""
    for person, visited in world.visited.items():
        for old, new in zip(visited, visited[1:], strict=False):
            if visited.count(old) == visited.count(new) == 1:
                yield person, old, new


def before(world: World, rng: Random) -> Iterator[Pair]:
    for person, old, new in _steps(world):
        yield f"Where was {person} before the {new}?", f"the {old}"


def after(world: World, rng: Random) -> Iterator[Pair]:
    for person, old, new in _steps(world):
        yield f"Where did {person} go after the {old}?", f"the {new}"


def wet(world: World, rng: Random) -> Iterator[Pair]:
    for person in world.people:
        yield f"Is {person} wet?", yes_or_no(person in world.wet)


def why_wet(world: World, rng: Random) -> Iterator[Pair]:
    for person in world.people:
        if person in world.wet:
            yield f"Why is {person} wet?", "because of the rain"


def bright(world: World, rng: Random) -> Iterator[Pair]:
    for place in world.places:
        if place not in OUTDOORS:
            yield f"Is the lamp in the {place} on?", yes_or_no(place in world.lit)


def feels(world: World, rng: Random) -> Iterator[Pair]:
    for person, feeling in world.feeling.items():
        adjective = feeling if rng.random() < 0.5 else rng.choice(FEELINGS)
        yield f"Is {person} {adjective}?", yes_or_no(adjective == feeling)


def why_went(world: World, rng: Random) -> Iterator[Pair]:
    for (person, place), feeling in world.motives.items():
        if world.visited[person].count(place) == 1:
            yield f"Why did {person} go to the {place}?", f"because {person} was {feeling}"


QUESTION_KINDS: dict[str, Callable[[World, Random], Iterator[Pair]]] = {
    "where": where, "where thing": where_thing, "who has": who_has, "what has": what_has, "how many": how_many,
    "how many people": how_many_people, "is in": is_in, "inside": inside, "with": company, "before": before,
    "after": after, "wet": wet, "why wet": why_wet, "bright": bright, "feels": feels, "why went": why_went,
}  # fmt: skip


def draw_questions(world: World, level: Level, rng: Random) -> list[Question]:
    """At most `level.questions` different questions in random order, drawn evenly from all kinds."""
    by_kind = []
    for kind in rng.sample(level.kinds, len(level.kinds)):
        questions = [Question(text, answer, kind) for text, answer in QUESTION_KINDS[kind](world, rng)]
        questions = [question for question in questions if question.answer not in COMMON_ANSWERS or rng.random() < 0.3]
        rng.shuffle(questions)
        by_kind.append(questions)
    drawn = []
    while any(by_kind) and len(drawn) < level.questions:
        drawn += [questions.pop() for questions in by_kind if questions]
    drawn = drawn[: level.questions]
    rng.shuffle(drawn)
    return drawn
