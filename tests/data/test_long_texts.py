"""Long texts: their length, the depth of what is asked for, and answers that follow from the text alone."""

import re

import pytest

from regard.data.world.english import NUMBERS, PLACES, read_sentence
from regard.data.world.long_texts import LONG_TASKS, LongQuestion, long_question, merge


def words(text: str) -> int:
    return len(text.split())


def sentences(text: str) -> list[str]:
    return re.split(r"(?<=\.) ", text)


def answer_of(found: LongQuestion) -> str:
    """From the sentences, by following people and things."""
    events = [read_sentence(sentence)[0] for sentence in sentences(found.text)]
    at: dict[str, str] = {}
    carried: dict[str, str] = {}
    for event in events:
        if event.verb in ("be", "move"):
            at[event.who] = event.where
        elif event.verb == "lie":
            at[event.what] = event.where
        else:
            assert event.verb == "take"
            carried[event.what] = event.who
    asked = found.question.split()[-1].rstrip("?")
    if found.question.startswith("How many"):
        return NUMBERS[sum(place == asked for place in at.values())]
    return at[carried.get(asked, asked)]


@pytest.mark.ledger("long.needle")
@pytest.mark.parametrize("task", LONG_TASKS)
@pytest.mark.parametrize("length", [60, 400])
def test_answers_follow_from_the_text(task: str, length: int) -> None:
    for seed in range(30):
        for depth in (0.0, 0.5, 1.0):
            found = long_question(task, seed, length, depth, words)
            assert length - 12 < words(found.text) <= length
            assert answer_of(found) == found.answer and found.answer in found.choices


@pytest.mark.ledger("long.needle")
def test_the_needle_stands_at_its_depth() -> None:
    for depth in (0.0, 0.25, 0.5, 0.75, 1.0):
        found = long_question("needle", 3, 600, depth, words)
        thing = found.question.split()[-1].rstrip("?")
        lines = sentences(found.text)
        (index,) = [i for i, line in enumerate(lines) if thing in line]
        assert abs(index / (len(lines) - 1) - depth) < 0.02


@pytest.mark.ledger("long.ruler")
def test_the_harder_tasks_have_distractors() -> None:
    """Several things lie in places; a person takes a thing and walks on; and people are counted."""
    several = sentences(long_question("several", 0, 400, 0.5, words).text)
    assert sum(read_sentence(line)[0].verb == "lie" for line in several) == 8
    hops = long_question("hops", 0, 400, 0.0, words)
    events = [read_sentence(line)[0] for line in sentences(hops.text)]
    (taking,) = [event for event in events if event.verb == "take"]
    (walking,) = [event for event in events if event.verb == "move" and event.who == taking.who]
    assert events.index(walking) > events.index(taking) and walking.where == hops.answer
    assert hops.answer not in hops.question
    answers = {long_question("count", seed, 100, 0.0, words).answer for seed in range(40)}
    assert answers == {"one", "two", "three", "four"}


def test_answers_are_balanced_and_do_not_follow_from_frequencies() -> None:
    """The place of the needle is also one where people walk, so that it is not the rarest of the text."""
    found = [long_question("needle", seed, 800, 0.5, words) for seed in range(60)]
    assert len({each.answer for each in found}) > 20
    counts = [re.findall(r"\w+", each.text).count(each.answer) for each in found]
    assert sum(count > 1 for count in counts) > 50


def test_the_first_of_the_choices_that_is_named_counts() -> None:
    found = LongQuestion("", "", "park", PLACES)
    assert found.named("The ball is in the park, not in the barn.") == "park"
    assert {found.named(text) for text in ("In the barn!", "**barn**", "barn: the ball", "the barn's door")} == {"barn"}
    assert found.named("In the Barn.") == "barn" and found.named("I do not know.") is None
    counted = LongQuestion("", "", "two", NUMBERS[1:5])
    assert (
        counted.named("2 people") == "two" and counted.named("There are two.") == "two" and counted.named("9") is None
    )


def test_planted_sentences_keep_their_order() -> None:
    filler = [f"{i}." for i in range(4)]
    assert merge(filler, [(0.5, "b."), (0.0, "a."), (1.0, "d."), (0.5, "c.")]) == "a. 0. 1. b. c. 2. 3. d."
    assert merge([], [(0.7, "a."), (0.2, "b.")]) == "b. a."


def test_impossible_texts_are_refused() -> None:
    with pytest.raises(ValueError, match="and a text has room for 3; use longer texts"):
        long_question("several", 0, 3, 0.5, words)
    with pytest.raises(ValueError, match="choose one of needle"):
        long_question("haystack", 0, 100, 0.5, words)
    assert long_question("needle", 1, 50, 0.5, words) == long_question("needle", 1, 50, 0.5, words)
