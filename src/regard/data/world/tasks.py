"""Examples of the simulated world for each kind of training, as mappings like the lines of a JSONL file.

`example(task, seed, level, split)` is a pure function. Tasks about a whole story use `story(seed, level, split)`: the
same seed has the same story in all of them. Tasks about a passage (two consecutive sentences) take it from a story of
the split, and the hash of the passage's own events must be in the split too. A held-out passage is therefore never an
example of training, in any wording; its single sentences may be.
"""

import json
import re
from collections.abc import Callable, Iterator
from itertools import islice
from random import Random
from typing import Any

from regard.data.world import draw_worlds, split_of, story
from regard.data.world.answers import ask, feedback, instructions, preference
from regard.data.world.english import (
    CONTAINERS,
    FEELINGS,
    FOOD,
    INDOORS,
    NUMBERS,
    PEOPLE,
    PLACES,
    THINGS,
    WORDINGS,
    Event,
    fill_wording,
    wordings_of,
    write_sentences,
)
from regard.data.world.facts import Fact, draw_fact
from regard.data.world.levels import LEVELS
from regard.data.world.questions import how_many, how_many_people
from regard.data.world.register_tasks import relevance, sourced
from regard.data.world.second_language import translate
from regard.data.world.tool_tasks import tool_trace

SENTENCES = 2  # of a passage
NEGATIVES = 2
RECORD = "Write the last event as a JSON object with the keys verb, who, what and where."
OTHER_PEOPLE = (  # in no story
    "Amara", "Bruno", "Chloe", "Dmitri", "Elif", "Farid", "Greta", "Hassan", "Ingrid", "Jorge", "Kenji", "Leila",
    "Milan", "Nadia", "Omar", "Priya", "Quentin", "Ruth", "Stefan", "Tariq", "Uma", "Viktor", "Wanda", "Yusuf", "Zoe",
)  # fmt: skip

ENTITIES = (
    dict.fromkeys(PEOPLE, "PERSON") | dict.fromkeys(PLACES, "PLACE") | dict.fromkeys(THINGS + CONTAINERS, "THING")
)
LABELS = {
    "event_kind": tuple(WORDINGS),
    "yes_no": ("no", "yes"),
    "entities": ("O", "PERSON", "PLACE", "THING"),
    "entailment": (0, 1),
}


def story_text(seed: int, level: int, split: str) -> dict[str, Any]:
    return {"text": story(seed, level, split).text}


def document(seed: int, level: int, split: str) -> dict[str, Any]:
    """A story, then questions with their answers, as plain text."""
    tale = story(seed, level, split)
    return {"text": " ".join([tale.text, *(f"{question.text} {question.answer}." for question in tale.questions)])}


def story_sentences(seed: int, level: int, split: str) -> dict[str, Any]:
    return {"sentences": list(story(seed, level, split).sentences)}


def chat(seed: int, level: int, split: str) -> dict[str, Any]:
    """A story, then questions and answers in turns; the first question follows the story in the same message."""
    tale = story(seed, level, split)
    messages = []
    for question in tale.questions:
        content = question.text if messages else f"{tale.text} {question.text}"
        messages += [{"role": "user", "content": content}, {"role": "assistant", "content": question.answer}]
    return {"messages": messages}


def yes_no(seed: int, level: int, split: str) -> dict[str, Any]:
    """A story and a question; half of the answers are yes."""
    text, fact = _story_with_fact(seed, level, split)
    return {"text": f"{text} {fact.question}", "label": "yes" if fact.truth else "no"}


def entailment(seed: int, level: int, split: str) -> dict[str, Any]:
    """A story and a statement, which follows from the story (1) or contradicts it (0)."""
    text, fact = _story_with_fact(seed, level, split)
    return {"first": text, "second": fact.statement, "label": int(fact.truth)}


def counting(seed: int, level: int, split: str) -> dict[str, Any]:
    """A story and a question how many things or people there are; the numbers that occur are equally likely."""
    world, rng = next(draw_worlds(seed, level, split))
    text = " ".join(write_sentences(world.events, rng))
    kind = rng.choice((how_many, how_many_people))
    counts = {question: NUMBERS.index(answer) for question, answer in kind(world, rng)}
    number = rng.choice(sorted(set(counts.values())))
    question = rng.choice([question for question, value in counts.items() if value == number])
    return {"text": f"{text} {question}", "label": float(number)}


def translation(seed: int, level: int, split: str, sentences: int = SENTENCES) -> dict[str, Any]:
    """English and its translation into the second language."""
    events, rng = next(draw_passages(seed, level, split, sentences))
    source = " ".join(write_sentences(events, rng))
    return {"source": source, "target": translate(source)}


def event_kind(seed: int, level: int, split: str) -> dict[str, Any]:
    """Two sentences, and the kind of the second event."""
    events, rng = next(draw_passages(seed, level, split))
    return {"text": " ".join(write_sentences(events, rng)), "label": events[-1].verb}


def record(seed: int, level: int, split: str) -> dict[str, Any]:
    """An instruction with a passage, and its last event as JSON; the people of held-out passages have other names."""
    events, rng = next(draw_passages(seed, level, split))
    text = " ".join(write_sentences(events, rng))
    answer = json.dumps({key: value or None for key, value in events[-1]._asdict().items() if key != "why"})
    if split == "held-out":
        people = [name for name in PEOPLE if re.search(rf"\b{name}\b", text)]
        names = dict(zip(people, rng.sample(OTHER_PEOPLE, len(people)), strict=True))
        text, answer = (re.sub(r"\w+", lambda word: names.get(word[0], word[0]), string) for string in (text, answer))
    messages = [{"role": "user", "content": f"{text}\n{RECORD}"}, {"role": "assistant", "content": answer}]
    return {"messages": messages}


def entities(seed: int, level: int, split: str) -> dict[str, Any]:
    """The words and punctuation marks of a passage, each with its label."""
    events, rng = next(draw_passages(seed, level, split))
    tokens = re.findall(r"\w+|[.,]", " ".join(write_sentences(events, rng)))
    return {"tokens": tokens, "labels": [ENTITIES.get(token, "O") for token in tokens]}


def pairs(seed: int, level: int, split: str, sentences: int = SENTENCES) -> dict[str, Any]:
    """A passage in two wordings that differ in every sentence, and passages that differ from it in one name."""
    for events, rng in draw_passages(seed, level, split, sentences):
        changed = (other for other in change_one_name(events, rng) if split_of(other) == split)
        if len(negatives := list(islice(changed, NEGATIVES))) == NEGATIVES:
            wordings = [rng.sample(wordings_of(event), 2) for event in events]
            anchor, positive = (" ".join(map(fill_wording, events, chosen)) for chosen in zip(*wordings, strict=True))
            texts = [" ".join(write_sentences(negative, rng)) for negative in negatives]
            return {"anchor": anchor, "positive": positive, "negatives": texts}
    raise AssertionError("unreachable: passages are endless")


TASKS: dict[str, Callable[[int, int, str], dict[str, Any]]] = {
    "story": story_text,
    "document": document,
    "sentences": story_sentences,
    "chat": chat,
    "translation": translation,
    "pairs": pairs,
    "event_kind": event_kind,
    "record": record,
    "yes_no": yes_no,
    "entities": entities,
    "entailment": entailment,
    "count": counting,
    "question": ask,
    "instructions": instructions,
    "preference": preference,
    "feedback": feedback,
    "sourced": sourced,
    "relevance": relevance,
    "tools": tool_trace,
}


def example(task: str, seed: int, level: int = 1, split: str = "train") -> dict[str, Any]:
    if task not in TASKS:
        raise ValueError(f"task={task!r} is not a task of the world; choose one of {', '.join(TASKS)}")
    return TASKS[task](seed, level, split)


def draw_passages(
    seed: int, level: int, split: str, sentences: int = SENTENCES
) -> Iterator[tuple[list[Event], Random]]:
    """An endless iterator of consecutive events whose own hash is in the split; kinds of the last are balanced."""
    if not 1 <= sentences <= 5:
        raise ValueError(f"sentences={sentences} is not between 1 and 5, the length of the shortest story")
    for world, rng in draw_worlds(seed, level, split):
        ends = range(sentences, len(world.events) + 1)
        passages = [world.events[end - sentences : end] for end in ends]
        passages = [events for events in passages if split_of(events) == split]
        if passages:
            kind = rng.choice(sorted({events[-1].verb for events in passages}))
            yield rng.choice([events for events in passages if events[-1].verb == kind]), rng


def change_one_name(events: list[Event], rng: Random) -> Iterator[list[Event]]:
    """All passages that differ in one name, which does not occur in the passage, in random order."""
    used = {name for event in events for name in event}
    changes = [
        (index, field, name)
        for index, event in enumerate(events)
        for field in ("who", "what", "where", "why")
        for name in alternatives(event, getattr(event, field))
        if name not in used
    ]
    for index, field, name in rng.sample(changes, len(changes)):
        yield [*events[:index], events[index]._replace(**{field: name}), *events[index + 1 :]]


def alternatives(event: Event, name: str) -> tuple[str, ...]:
    """The names of the same group; () for an empty field."""
    if event.verb == "eat" and name in FOOD:
        return FOOD
    if event.verb in ("light", "darken") and name in PLACES:
        return INDOORS
    return next((group for group in (PEOPLE, PLACES, THINGS, CONTAINERS, FEELINGS) if name in group), ())


def _story_with_fact(seed: int, level: int, split: str) -> tuple[str, Fact]:
    world, rng = next(draw_worlds(seed, level, split))
    text = " ".join(write_sentences(world.events, rng))
    return text, draw_fact(world, LEVELS[level], rng)
