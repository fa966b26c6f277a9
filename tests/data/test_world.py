"""The simulated world: correct answers, disjoint splits, reproducible and varied stories, no guessable questions."""

import subprocess
import sys
from collections import Counter, defaultdict

import pytest

from regard.data.world import LEVELS, stories, story
from regard.data.world.english import CONTAINERS, PEOPLE, PLACES, THINGS, WITH_MOTIVE, WORDINGS
from regard.data.world.questions import QUESTION_KINDS
from regard.data.world.simulation import ACTIONS
from tests.data import oracle


def first_stories(level, count, split="train"):
    return [story(seed, level, split) for seed in range(count)]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("split", ["train", "held-out"])
def test_answers_agree_with_an_independent_oracle(level, split):
    for tale in first_stories(level, 150, split):
        for question in tale.questions:
            assert question.answer == oracle.answer(question.text, list(tale.events)), (tale.text, question)


@pytest.mark.parametrize("level", LEVELS)
def test_a_sentence_names_everything_in_its_event(level):
    for tale in first_stories(level, 100):
        assert len(tale.sentences) == len(tale.events)
        for sentence, event in zip(tale.sentences, tale.events, strict=True):
            place = {event.where} if event.verb != "drop" else set()
            assert oracle.mentioned_names(sentence) == ({event.who, event.what} | place) & (
                {*PEOPLE, *PLACES, *THINGS, *CONTAINERS}
            )
            assert sentence[0].isupper()
            assert sentence.endswith(".")
            assert "{" not in sentence


@pytest.mark.parametrize("count", [1000, pytest.param(5000, marks=pytest.mark.slow)])
def test_splits_share_no_events(count):
    events = {split: {tale.events for tale in first_stories(1, count, split)} for split in ("train", "held-out")}
    assert not events["train"] & events["held-out"]
    assert len(events["held-out"]) > 0.998 * count


@pytest.mark.parametrize("level", LEVELS)
def test_stories_are_varied(level):
    tales = first_stories(level, 500)
    assert len({tale.text for tale in tales}) > 498
    names = Counter(name for tale in tales for name in oracle.mentioned_names(tale.text))
    assert len(names) > 90


def test_stories_are_the_same_in_another_process():
    code = "from regard.data.world import story; print([story(s, l, 'held-out') for s in range(9) for l in (1, 4)])"
    runs = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    expected = f"{[story(s, level, 'held-out') for s in range(9) for level in (1, 4)]}\n"
    assert runs == {expected}


@pytest.mark.parametrize("level", LEVELS)
def test_no_kind_of_question_is_rare_or_has_one_common_answer(level):
    answers = defaultdict(Counter)
    for tale in first_stories(level, 300):
        assert len({question.text for question in tale.questions}) == len(tale.questions)
        for question in tale.questions:
            answers[question.kind][question.answer] += 1
    assert set(answers) == set(LEVELS[level].kinds)
    for kind, counts in answers.items():
        total = sum(counts.values())
        assert total > 50, kind
        if kind != "why wet":
            assert counts.most_common(1)[0][1] < 0.85 * total, (kind, counts.most_common(3))


def test_all_actions_kinds_and_wordings_are_used():
    assert set(ACTIONS) == {action for level in LEVELS.values() for action in level.actions}
    assert set(QUESTION_KINDS) == {kind for level in LEVELS.values() for kind in level.kinds}
    tales = [tale for level in LEVELS for tale in first_stories(level, 300)]
    assert {event.verb for tale in tales for event in tale.events} == set(WORDINGS)
    assert any(event.why for tale in tales for event in tale.events)
    assert len(WITH_MOTIVE) > 1


def test_names_are_distinct():
    names = [*PEOPLE, *PLACES, *THINGS, *CONTAINERS]
    assert len(set(names)) == len(names)
    assert min(len(PEOPLE), len(PLACES), len(THINGS)) >= 24


def test_stories_start_at_the_given_seed():
    stream = stories(level=2, start=7)
    assert next(stream) == story(7, 2)
    assert next(stream) == story(8, 2)


@pytest.mark.parametrize("wrong", [{"level": 9}, {"split": "test"}])
def test_an_unknown_level_or_split_is_refused(wrong):
    with pytest.raises(ValueError, match="choose one of"):
        story(0, **wrong)
