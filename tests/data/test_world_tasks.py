"""Examples of the world for each training task: correct by the oracle, split by events, reproducible, balanced."""

import json
import re
import subprocess
import sys
from collections import Counter
from hashlib import blake2b
from pathlib import Path

import pytest

from regard.data.world import LEVELS, SPLITS, split_of, story
from regard.data.world.answers import grade, score_answers
from regard.data.world.english import NUMBERS, PEOPLE, WORDINGS, read_sentence, wordings_of
from regard.data.world.tasks import ENTITIES, LABELS, TASKS, example, pairs, translation
from tests.data import oracle

PAGE = Path(__file__).parents[2] / "docs" / "topics" / "world.md"


def examples(task, level, count=60, split="train"):
    return [example(task, seed, level, split) for seed in range(count)]


def events_of(text):
    return tuple(read_sentence(sentence)[0] for sentence in re.split(r"(?<=\.) ", text))


def first_text(row):
    """The passage or story of an example, without its question."""
    text = row.get("source") or row.get("anchor") or row.get("first") or row.get("text")
    text = text or re.sub(r" ([.,])", r"\1", " ".join(row["tokens"]))
    return text if text.endswith(".") else text[: text.rindex(". ") + 1]


@pytest.mark.parametrize("level", LEVELS)
def test_reading_a_sentence_is_the_inverse_of_writing_it(level):
    for seed in range(100):
        tale = story(seed, level)
        for sentence, event in zip(tale.sentences, tale.events, strict=True):
            read, wording = read_sentence(sentence)
            assert read == event
            assert len(sentence) >= len(re.sub(r"{\w+}", "", wordings_of(event)[wording]))


def test_a_sentence_that_is_not_of_the_world_is_refused():
    with pytest.raises(ValueError, match="no sentence of the world; write it as in"):
        read_sentence("Anna juggles.")


def test_stories_are_those_of_the_recorded_seeds():
    """The digest was computed before the tasks were added; recorded results refer to these stories."""
    tales = [story(seed, level, split) for level in LEVELS for split in SPLITS for seed in range(20)]
    assert blake2b(repr(tales).encode(), digest_size=8).hexdigest() == "319d45ba4a7a65ea"


def test_examples_are_the_same_in_another_process():
    rows = "[example(task, seed, level) for task in TASKS for seed in (1, 2) for level in (1, 4)]"
    code = f"from regard.data.world.tasks import TASKS, example; print({rows})"
    env = {"PYTHONHASHSEED": "3", "PYTHONPATH": ":".join(sys.path)}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert run.stdout == f"{[example(task, seed, level) for task in TASKS for seed in (1, 2) for level in (1, 4)]}\n"


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("task", ["translation", "pairs", "event_kind", "entities", "yes_no"])
def test_no_held_out_events_are_in_training(task, level):
    texts = {split: [first_text(row) for row in examples(task, level, 40, split)] for split in SPLITS}
    events = {split: {events_of(text) for text in texts[split]} for split in SPLITS}
    assert not events["train"] & events["held-out"]
    assert all(split_of(list(passage)) == split for split in SPLITS for passage in events[split])


@pytest.mark.parametrize("sentences", [1, 2, 3])
def test_passages_of_every_length_are_split(sentences):
    rows = {split: [translation(seed, 1, split, sentences) for seed in range(300)] for split in SPLITS}
    for key in ("source", "target"):
        assert not {row[key] for row in rows["train"]} & {row[key] for row in rows["held-out"]}
    assert all(len(events_of(row["source"])) == sentences for row in rows["train"])


@pytest.mark.parametrize("level", LEVELS)
def test_negatives_are_of_the_same_split_and_differ_in_one_name(level):
    for split in SPLITS:
        for row in examples("pairs", level, 60, split):
            anchor, positive = events_of(row["anchor"]), events_of(row["positive"])
            assert anchor == positive
            pairs_of_sentences = zip(row["anchor"].split(". "), row["positive"].split(". "), strict=True)
            assert all(first != second for first, second in pairs_of_sentences)
            assert len(set(row["negatives"])) == 2
            for negative in map(events_of, row["negatives"]):
                assert split_of(list(negative)) == split
                fields = [
                    (a, b) for old, new in zip(anchor, negative, strict=True) for a, b in zip(old, new, strict=True)
                ]
                assert sum(a != b for a, b in fields) == 1


@pytest.mark.parametrize("level", LEVELS)
def test_two_anchors_rarely_have_the_same_events(level):
    """Other rows of a batch serve as negatives: fewer than one pair of rows in 50,000 has the same events."""
    count = 500
    passages = Counter(events_of(row["anchor"]) for row in examples("pairs", level, count))
    same = sum(number * (number - 1) // 2 for number in passages.values())
    assert same <= 2
    assert 2 / (count * (count - 1) / 2) < 1 / 50_000


@pytest.mark.parametrize("level", LEVELS)
def test_yes_no_and_entailment_agree_with_the_oracle(level):
    answers = Counter()
    for seed in range(200):
        row, pair = example("yes_no", seed, level), example("entailment", seed, level)
        question = row["text"].removeprefix(pair["first"]).strip()
        assert row["label"] == oracle.answer(question, list(events_of(pair["first"])))
        assert question_of(pair["second"]) == question
        assert pair["label"] == (row["label"] == "yes")
        answers[row["label"]] += 1
    assert 70 <= answers["yes"] <= 130
    assert set(answers) == set(LABELS["yes_no"])


def question_of(statement):
    for pattern, question in (
        (r"(\w+) has the (\w+)\.", r"Does \1 have the \2?"),
        (r"The (.*) is (.*)\.", r"Is the \1 \2?"),
        (r"(\w+) is (.*)\.", r"Is \1 \2?"),
    ):
        if re.fullmatch(pattern, statement):
            return re.sub(pattern, question, statement)
    raise AssertionError(statement)


@pytest.mark.parametrize("level", LEVELS)
def test_counts_agree_with_the_oracle(level):
    labels = Counter()
    for row in examples("count", level, 150):
        text = first_text(row)
        number = oracle.answer(row["text"].removeprefix(text).strip(), list(events_of(text)))
        assert row["label"] == float(NUMBERS.index(number))
        labels[row["label"]] += 1
    assert max(labels.values()) < 100
    assert len(labels) >= 3


@pytest.mark.parametrize("level", LEVELS)
def test_kinds_of_events_are_those_of_the_last_sentence_and_balanced(level):
    rows = examples("event_kind", level, 300)
    assert all(row["label"] == events_of(row["text"])[-1].verb for row in rows)
    labels = Counter(row["label"] for row in rows)
    assert set(labels) <= set(LABELS["event_kind"]) == set(WORDINGS)
    assert len(labels) >= 5
    assert max(labels.values()) < 120


def test_tokens_have_the_labels_of_the_names():
    for row in examples("entities", 4, 100):
        passage = events_of(first_text(row))
        named = {name for event in passage for name in event[1:] if name in ENTITIES}
        found = {token for token, label in zip(row["tokens"], row["labels"], strict=True) if label != "O"}
        assert found == named
        assert set(row["labels"]) <= set(LABELS["entities"])
        assert all((label == "PERSON") == (token in PEOPLE) for token, label in zip(*row.values(), strict=True))


def test_the_text_tasks_are_the_story_and_its_questions():
    tale = story(5, 3, "held-out")
    assert example("story", 5, 3, "held-out") == {"text": tale.text}
    assert example("sentences", 5, 3, "held-out") == {"sentences": list(tale.sentences)}
    messages = example("chat", 5, 3, "held-out")["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"] * len(tale.questions)
    assert messages[0]["content"] == f"{tale.text} {tale.questions[0].text}"
    assert [message["content"] for message in messages[2::2]] == [question.text for question in tale.questions[1:]]
    assert [message["content"] for message in messages[1::2]] == [question.answer for question in tale.questions]
    assert example("yes_no", 5, 3, "held-out")["text"].startswith(tale.text)


def test_answers_of_the_assistant_have_two_forms_and_a_rejected_one_lacks_one_of_two_virtues():
    pairs, kinds = examples("preference", 2, 200), []
    for number, pair in enumerate(pairs):
        answer = example("question", number, 2)["answer"]
        assert grade(pair["chosen"], answer) == (True, True)
        rejected = grade(pair["rejected"], answer)
        assert rejected in ((True, False), (False, True)) and rejected.score < grade(pair["chosen"], answer).score
        kinds.append(rejected.correct)
    assert 70 < sum(kinds) < 130
    forms = [grade(row["messages"][-1]["content"], "").formatted for row in examples("instructions", 2, 200)]
    assert 70 < sum(forms) < 130
    labels = examples("feedback", 2, 200)
    assert 70 < sum(row["label"] for row in labels) < 130
    for row, pair in zip(labels, pairs, strict=True):
        assert row["completion"] == pair["chosen" if row["label"] else "rejected"]
    assert grade("Answer: the park", "the park") == (False, False)
    answers = [[{"role": "assistant", "content": text}] for text in ("Answer: a.", "a", "Answer: b.", "b")]
    assert score_answers([], answers, answer=["a"] * 4) == [1.5, 1.0, 0.25, 0.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("poem", 0), "choose one of story"), (("pairs", 0, 9), "choose one of 1"), (("count", 0, 1, "test"), "train")],
)
def test_an_unknown_task_level_or_split_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        example(*arguments)
    with pytest.raises(ValueError, match="between 1 and 5"):
        pairs(0, 1, "train", sentences=9)


def test_the_examples_of_the_page_are_those_of_the_code():
    pattern = r"^### (\w+)\n\n[^#]*?Level (\d), seeds ([\d, ]+):\n\n```text\n(.*?)```"
    shown = re.findall(pattern, PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert [task for task, *_ in shown] == list(TASKS)
    for task, level, seeds, lines in shown:
        for seed, line in zip(seeds.split(", "), lines.splitlines(), strict=True):
            row = json.dumps(example(task, int(seed), int(level)))
            assert row == line or (line.endswith("…") and row.startswith(line[:-1])), task
