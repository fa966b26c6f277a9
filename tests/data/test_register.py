"""The register: facts, documents that state them, questions with one answer, and training examples."""

import random

import pytest

from regard.data.world.register import (
    ATTRIBUTES,
    FACTS,
    UNKNOWN,
    document,
    draw_question,
    question_who,
    register,
    unanswered_question,
)
from regard.data.world.tasks import example
from regard.text.source_prompt import CITATION, INSTRUCTIONS


def test_people_have_different_names_and_state_their_facts() -> None:
    people = register(0, 300)
    assert len({person.name for person in people}) == 300 and register(0, 300) == people != register(1, 300)
    for person in people:
        assert len({attribute for attribute, _ in person.facts}) == FACTS == len(person.sentences)
        for (attribute, value), sentence in zip(person.facts, person.sentences, strict=True):
            assert value in ATTRIBUTES[attribute].values and f" {value}" in sentence and "{" not in sentence
    text = document(people, "A title")
    assert text.startswith("# A title\n\n## ") and all(f"\n## {person.name}\n\n" in text for person in people)
    assert max(sum(person.name.split()[1] == name for person in people) for name in ("Halden", "Velberg")) < 300


def test_values_belong_to_one_attribute() -> None:
    values = [value for attribute in ATTRIBUTES.values() for value in attribute.values]
    assert len(values) == len(set(values))


def test_held_out_people_have_other_surnames() -> None:
    train, held_out = ({p.name.split()[1] for s in range(20) for p in register(s, 100, split)}
                       for split in ("train", "held-out"))  # fmt: skip
    assert train and held_out and not train & held_out
    with pytest.raises(ValueError, match="people=99999 is not between 1 and"):
        register(0, 99999)


def test_a_question_has_exactly_one_answer() -> None:
    people, rng = register(3, 200), random.Random(0)
    named = 0
    for _ in range(300):
        asked = draw_question(people, rng)
        person = people[asked.person]
        assert asked.text.endswith("?") and "{" not in asked.text
        if asked.answer == person.name:
            named += 1
            stated = [other for other in people if sum(value in asked.text for _, value in other.facts) == 2]
            assert person in stated
        else:
            assert person.name in asked.text and asked.answer in dict(person.facts).values()
    assert 30 < named < 90
    assert person.name in unanswered_question(people, asked.person, rng)


def test_who_has_two_facts_that_no_other_person_has() -> None:
    people = register(5, 40)
    for index in range(40):
        asked = question_who(people, index, random.Random(index))
        if asked is not None:
            pairs = [(a, b) for a in people[index].facts for b in people[index].facts if a < b]
            matching = [pair for pair in pairs if all(f" {value}" in asked.text for _, value in pair)]
            assert any(sum(set(pair) <= {*person.facts} for person in people) == 1 for pair in matching)


def test_answers_cite_the_source_that_states_them() -> None:
    unknown = turns = 0
    for seed in range(60):
        messages = example("sourced", seed)["messages"]
        assert messages[0] == {"role": "system", "content": INSTRUCTIONS}
        sources = messages[1]["content"].split("</source>\n")[:-1]
        for asked, answer in zip(messages[1::2], messages[2::2], strict=True):
            question = asked["content"].split("Question: ")[-1]
            turns += 1
            if answer["content"] == UNKNOWN:
                unknown += 1
                continue
            cited = sources[int(CITATION.search(answer["content"])[1]) - 1]
            assert CITATION.sub("", answer["content"]).strip() in cited
            name = cited.split("## ")[1].split("\n")[0]
            assert name in question or name in answer["content"]
    assert 0.08 < unknown / turns < 0.3


def test_one_section_of_a_group_answers_its_question() -> None:
    for group in range(20):
        rows = [example("relevance", 8 * group + number, 1, "held-out") for number in range(8)]
        assert [row["label"] for row in rows] == [1, *[0] * 7] and {row["group"] for row in rows} == {group}
        assert len({row["first"] for row in rows}) == 1 and len({row["second"] for row in rows}) == 8
        name = rows[0]["second"].split("## ")[1].split("\n")[0]
        assert all(f"## {name}\n" not in row["second"] for row in rows[1:])
