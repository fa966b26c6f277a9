"""Training examples of the register: answers from sources with citations, and pairs of a question and a section.

    sourced      sources, a question, and the answer with a citation: the cello [2]; more questions follow in turns
    relevance    a question and the section of a person, with 1 if it answers the question and 0 if not

The prompt of `sourced` is that of `regard ask` (text/source_prompt.py).
"""

from random import Random
from typing import Any

from regard.data.world.register import (
    UNKNOWN,
    Person,
    RegisterQuestion,
    draw_question,
    file_name,
    question_about,
    question_who,
    register,
    title,
    unanswered_question,
)
from regard.text.source_prompt import PromptSource, question_messages

SOURCES = (1, 4)  # fewest and most
TURNS = 6
GROUP = 8  # sections per question of `relevance`: one that answers it, and others
PEOPLE = 24  # among whom the others are chosen


def sourced(seed: int, level: int, split: str) -> dict[str, Any]:
    """A conversation about some people of a register. One question in six has no answer in the sources."""
    rng = Random(f"sourced/{split}/{seed}")
    shown = rng.randint(*SOURCES)
    people = register(seed, shown + 2, split)  # the last two are in no source
    first = rng.randrange(1, 300)
    sources = [source_of(person, number, rng, first + 9 * number) for number, person in enumerate(people[:shown], 1)]
    messages: list[dict[str, str]] = []
    for _ in range(TURNS):
        question, answer = draw_turn(people, shown, rng)
        asked = [{"role": "user", "content": question}] if messages else question_messages(question, sources)
        messages += [*asked, {"role": "assistant", "content": answer}]
    return {"messages": messages}


def draw_turn(people: list[Person], shown: int, rng: Random) -> tuple[str, str]:
    """A question, and its answer from the first `shown` people."""
    kind, index = rng.random(), rng.randrange(shown)
    if kind < 1 / 12:
        return question_about(people, rng.randrange(shown, len(people)), rng).text, UNKNOWN
    if kind < 1 / 6:
        return unanswered_question(people, index, rng), UNKNOWN
    who = question_who(people, index, rng) if kind > 2 / 3 else None
    asked = who or question_about(people, index, rng)
    return asked.text, f"{asked.answer} [{index + 1}]"


def source_of(person: Person, number: int, rng: Random, line: int) -> PromptSource:
    """The section of a person, as it is found in a document of the register."""
    part = rng.randrange(1, 60)
    section = (title(part), person.name)
    return PromptSource(number, file_name(part), "line", line, line + 2, section, 0, person.section.strip())


def relevance(seed: int, level: int, split: str) -> dict[str, Any]:
    """Pair number `seed % 8` of a question; the first answers it. Up to four others share a name or fact with it."""
    group, number = divmod(seed, GROUP)
    rng = Random(f"relevance/{split}/{group}")
    people = register(group, PEOPLE, split)
    asked = draw_question(people, rng)
    person = people[choose_others(people, asked, rng)[number - 1] if number else asked.person]
    passage = f"{title(rng.randrange(1, 60))} > {person.name}\n{person.section.strip()}"
    return {"first": asked.text, "second": passage, "label": int(number == 0), "group": group}


def choose_others(people: list[Person], asked: RegisterQuestion, rng: Random) -> list[int]:
    """Seven people who do not answer the question, those who share a name or a fact with the right one first."""
    right = people[asked.person]
    others = [index for index in rng.sample(range(len(people)), len(people)) if index != asked.person]
    close = [index for index in others if shares(people[index], right)][: GROUP // 2]
    return [*close, *(index for index in others if index not in close)][: GROUP - 1]


def shares(person: Person, other: Person) -> bool:
    return bool({*person.name.split()} & {*other.name.split()} or {*person.facts} & {*other.facts})
