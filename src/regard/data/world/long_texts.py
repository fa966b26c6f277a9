"""Questions about long texts of the world, whose answers are at known depths (RULER, Hsieh et al. 2024).

The text is filler: people walk from place to place. Its length is in tokens of a tokenizer.

    needle     a thing lies in a place: one sentence at the depth                      Where is the drum?
    several    the same, among other things in other places                            Where is the drum?
    hops       a person takes the thing at the depth, and walks on somewhere later     Where is the drum?
    count      some people are in a place: one sentence each, anywhere in the text     How many people are in the barn?

depth: 0 is the beginning of the text, 1 its end; the text of `count` has none. Every answer is one of few words, so
that guesses have a known rate.
"""

import re
from collections.abc import Callable
from random import Random
from typing import NamedTuple

from regard.data.world.english import NUMBERS, PEOPLE, PLACES, THINGS, Event, write_sentence

SEVERAL = 8  # things, of which one is asked for
MOST_COUNTED = 4
FILLERS = 12  # people who only walk


class LongQuestion(NamedTuple):
    text: str
    question: str
    answer: str
    choices: tuple[str, ...]  # the words that could be the answer

    def named(self, output: str) -> str | None:
        """The first of the choices that occurs in an output."""
        words = re.findall(r"\w+", output.lower())
        digits = {str(number): word for number, word in enumerate(NUMBERS)}
        return next((word for word in (digits.get(word, word) for word in words) if word in self.choices), None)


class Planted(NamedTuple):
    """Sentences with their depths, and what is asked about them."""

    sentences: list[tuple[float, str]]
    question: str
    answer: str
    choices: tuple[str, ...]


def needle(rng: Random, depth: float, things: int = 1) -> Planted:
    names, places = rng.sample(THINGS, things), rng.sample(PLACES, things)
    depths = [depth, *(rng.random() for _ in range(things - 1))]
    sentences = [
        (at, write_sentence(Event("lie", what=thing, where=place), rng))
        for at, thing, place in zip(depths, names, places, strict=True)
    ]
    return Planted(sentences, f"Where is the {names[0]}?", places[0], PLACES)


def several(rng: Random, depth: float) -> Planted:
    return needle(rng, depth, SEVERAL)


def hops(rng: Random, depth: float) -> Planted:
    """The walk follows the taking, in the same place of the text or later."""
    person, thing = rng.choice(PEOPLE[FILLERS:]), rng.choice(THINGS)
    place = rng.choice(PLACES)
    taking = write_sentence(Event("take", person, thing), rng)
    walking = write_sentence(Event("move", person, where=place), rng)
    later = depth + (1 - depth) * rng.random()
    return Planted([(depth, taking), (later, walking)], f"Where is the {thing}?", place, PLACES)


def count(rng: Random, depth: float) -> Planted:
    people = rng.sample(PEOPLE[FILLERS:], rng.randint(1, MOST_COUNTED))
    place = rng.choice(PLACES)
    sentences = [(rng.random(), write_sentence(Event("be", person, where=place), rng)) for person in people]
    question = f"How many people are in the {place}?"
    return Planted(sentences, question, NUMBERS[len(people)], NUMBERS[1 : MOST_COUNTED + 1])


LONG_TASKS: dict[str, Callable[[Random, float], Planted]] = {
    "needle": needle,
    "several": several,
    "hops": hops,
    "count": count,
}


def long_question(task: str, seed: int, length: int, depth: float, count_tokens: Callable[[str], int]) -> LongQuestion:
    """A text of at most `length` tokens; ValueError if the sentences of the task alone have more."""
    if task not in LONG_TASKS:
        raise ValueError(f"task={task!r} is not a task; choose one of {', '.join(LONG_TASKS)}")
    rng = Random(f"long/{task}/{seed}/{depth}")
    planted = LONG_TASKS[task](rng, depth)
    places = [place for place in PLACES if f" {place}?" not in planted.question]
    used = count_tokens(" ".join(sentence for _, sentence in planted.sentences))
    if used > length:
        raise ValueError(
            f"the sentences that a question of {task} is about have {used} tokens, and a text has room for {length}; "
            "use longer texts"
        )
    filler: list[str] = []
    while used < length:
        person = rng.choice(PEOPLE[:FILLERS])
        filler.append(write_sentence(Event("move", person, where=rng.choice(places)), rng))
        used += count_tokens(f" {filler[-1]}")
    text = merge(filler, planted.sentences)
    while filler and count_tokens(text) > length:  # tokens at the borders of sentences can differ
        filler.pop()
        text = merge(filler, planted.sentences)
    return LongQuestion(text, planted.question, planted.answer, planted.choices)


def merge(filler: list[str], planted: list[tuple[float, str]]) -> str:
    """Each planted sentence after its share of the filler; of equal shares, in their order."""
    sentences: list[str] = []
    waiting = sorted(planted, key=lambda each: each[0])
    for index in range(len(filler) + 1):
        while waiting and round(waiting[0][0] * len(filler)) <= index:
            sentences.append(waiting.pop(0)[1])
        sentences += filler[index : index + 1]
    return " ".join(sentences)
