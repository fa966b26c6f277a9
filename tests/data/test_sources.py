"""Sources are endless, deterministic and split by content; invalid files are refused."""

import json
from collections import Counter
from itertools import pairwise
from typing import get_args

import numpy as np
import pytest
from sklearn.datasets import load_digits

from regard.data.readers import FORMATS
from regard.data.sources.base import Generated, first_epoch
from regard.data.sources.files import File, FileFormat, Pydoc
from regard.data.sources.images import Digits
from regard.data.sources.mixture import BLOCK, Mixture, open_sources
from regard.data.sources.world import WorldStories
from regard.data.world import story
from regard.data.world.tasks import TASKS, example
from regard.spec import SpecError
from regard.text.chat import DEFAULT_TEMPLATE, render


def text_of(example):
    return "".join(span.text for span in example["spans"])


def epoch(examples, number=0):
    count = examples.count
    return [examples.example(index)["text"] for index in range(number * count, (number + 1) * count)]


def all_examples(source):
    return [example for split in source.open() if split is not None for example in first_epoch(split, 0)]


def test_a_document_is_its_text_with_weights_for_answers():
    *spans, end = WorldStories(task="document", story_weight=0.5).open().train.example(3)["spans"]
    assert "".join(span.text for span in spans) == example("document", 3)["text"]
    assert end.special and end.weight == 1
    tale = story(3)
    assert [span.weight for span in spans] == [0.5, *[0.0, 1.0] * len(tale.questions)]
    assert [span.text for span in spans[2::2]] == [f" {question.answer}." for question in tale.questions]


def test_a_story_equals_the_conversation_of_the_chat_template():
    expected = story(0, 1, "held-out")
    example = WorldStories().open().held_out.example(0)
    messages = []
    for number, question in enumerate(expected.questions):
        content = f"{expected.text} {question.text}" if number == 0 else question.text
        messages += [{"role": "user", "content": content}, {"role": "assistant", "content": question.answer}]
    assert text_of(example) == render(DEFAULT_TEMPLATE, messages, add_generation_prompt=False)


def test_only_answers_and_their_end_tokens_have_weight_one():
    example = WorldStories().open().train.example(3)
    for previous, span in pairwise(example["spans"]):
        assert (span.weight == 1.0) == (previous.text == "<|assistant|>" or span.text == "<|end|>")


def test_a_source_that_would_never_be_used_is_refused(tmp_path):
    with pytest.raises(SpecError, match="weight=0.0001 is less than 1/1000 of all weights"):
        open_sources([Pydoc(), Pydoc(weight=0.0001)], 0, hold_out=True)


def test_the_error_of_an_example_names_its_file_and_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n{"text": "bad"}\n')

    def transform(example):
        if example["text"] == "bad":
            raise ValueError("it is bad")
        return example

    examples = File(path=str(path)).open(hold_out=False).train.map(transform)
    with pytest.raises(ValueError, match=r"a.jsonl, line 2: it is bad"):
        for _ in first_epoch(examples, 0):
            pass


def test_different_seeds_have_different_stories():
    first, second = (WorldStories().open(seed).train for seed in (1, 2))
    assert first.example(0) != second.example(0)
    assert first.example(5) == WorldStories().open(1).train.example(5)


@pytest.mark.parametrize("task", [task for task in TASKS if task not in ("chat", "document")])  # with weights
def test_every_task_of_the_world_is_a_source(task):
    train, held_out = WorldStories(task=task, level=2).open(seed=3)
    assert train.example(4) == example(task, (3 << 40) + 4, 2, "train")
    assert held_out.example(4) == example(task, (3 << 40) + 4, 2, "held-out")
    assert train.name == f"world {task} level 2, train, seed 3"


def test_unknown_tasks_of_the_world_are_refused():
    with pytest.raises(SpecError, match="task='pair' is not a task; did you mean 'pairs'"):
        WorldStories(task="pair")


def test_the_splits_of_pydoc_are_disjoint():
    train, held_out = map(set, map(epoch, Pydoc().open()))
    assert not train & held_out
    assert len(train) > 4 * len(held_out) > 0


def test_each_epoch_has_every_document_in_a_new_order():
    source = Pydoc().open().train
    first, second = epoch(source), epoch(source, 1)
    assert sorted(first) == sorted(second)
    assert first != second
    assert epoch(source) == first


def test_transformed_examples_keep_their_order_and_are_computed_once():
    calls = Counter()

    def count(example):
        calls[example["text"]] += 1
        return {"size": len(example["text"])}

    source = Pydoc().open().train
    counted = source.map(count)
    for index in range(2 * source.count):
        assert counted.example(index) == {"size": len(source.example(index)["text"])}
    assert calls == Counter(epoch(source))  # copies of a document are computed once each


def test_text_files_and_folders_are_read_completely(tmp_path):
    lines = [f"line {number} of the text\n" * 300 for number in range(40)]
    (tmp_path / "all.txt").write_text("".join(lines))
    examples = all_examples(File(path=str(tmp_path / "all.txt")))
    assert sum(len(example["text"]) for example in examples) == len("".join(lines))
    assert all(example["end"] is False for example in examples)
    for number, line in enumerate(lines):
        (tmp_path / f"{number}.md").write_text(line)
    examples = all_examples(File(path=str(tmp_path), pattern="*.md"))
    assert sorted(example["text"] for example in examples) == sorted(lines)


@pytest.mark.parametrize("characters", [2_000, 5_000, 16_000])
def test_a_short_text_has_a_training_and_a_held_out_part(tmp_path, characters):
    (tmp_path / "short.txt").write_text("".join(f"line {n}\n" for n in range(characters))[:characters])
    train, held_out = File(path=str(tmp_path / "short.txt")).open()
    assert 1 <= held_out.count <= train.count / 3
    assert not set(epoch(train)) & set(epoch(held_out))


def test_one_line_has_no_held_out_part(tmp_path):
    (tmp_path / "line.txt").write_text("a single line")
    train, held_out = File(path=str(tmp_path / "line.txt")).open()
    assert epoch(train) == ["a single line"] and held_out is None


def test_without_a_held_out_part_every_example_is_trained_on(tmp_path):
    (tmp_path / "short.txt").write_text("".join(f"line {n}\n" for n in range(1000)))
    source = File(path=str(tmp_path / "short.txt"))
    whole, none = source.open(hold_out=False)
    assert none is None
    assert whole.count == sum(split.count for split in source.open())


def test_the_tail_of_a_text_can_be_held_out(tmp_path):
    text = "".join(f"line {n}\n" for n in range(10_000))
    (tmp_path / "text.txt").write_text(text)
    held_out = File(path=str(tmp_path / "text.txt"), tail=True).open().held_out
    assert text.endswith("".join(sorted(epoch(held_out), key=lambda chunk: int(chunk.split()[1]))))


def test_jsonl_lines_are_examples(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"text": f"text {number}", "label": "a"} for number in range(20)] + [{"messages": [{"role": "user"}]}]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert sorted(map(str, all_examples(File(path=str(path))))) == sorted(map(str, rows))


@pytest.mark.parametrize(("line", "message"), [("{", "line 2: not valid JSON"), ("[1]", "line 2: expected an object")])
def test_an_invalid_line_is_reported_with_its_number(tmp_path, line, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"text": "good"}}\n{line}\n')
    with pytest.raises(ValueError, match=message):
        File(path=str(path)).open()


def test_unreadable_files_are_refused(tmp_path):
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    with pytest.raises(ValueError, match="not UTF-8"):
        File(path=str(tmp_path / "latin.txt")).open()
    with pytest.raises(FileNotFoundError, match="check the path"):
        File(path=str(tmp_path / "none.txt")).open()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no file that ends in .* give a pattern"):
        File(path=str(tmp_path / "empty")).open()
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(ValueError, match=r"empty.txt is empty"):
        File(path=str(tmp_path / "empty.txt")).open()


def test_formats_and_columns_of_files(tmp_path):
    (tmp_path / "a.csv").write_text("body,label\n" + "".join(f"text {n},{n % 2}\n" for n in range(30)))
    source = File(path=str(tmp_path / "a.csv"), columns=("text=body",))
    assert {(example["text"], example["label"]) for example in all_examples(source)} == {
        (f"text {n}", str(n % 2)) for n in range(30)
    }
    (tmp_path / "a.txt").write_text("one\n\ntwo\nthree\n")
    lines = File(path=str(tmp_path / "a.txt"), format="lines").open(hold_out=False).train
    assert sorted(epoch(lines)) == ["one", "three", "two"]
    with pytest.raises(SpecError, match="must be FIELD=COLUMN"):
        File(path="a.csv", columns=("body",))
    with pytest.raises(SpecError, match="format"):
        File(path="a.csv", format="cvs")
    assert set(get_args(FileFormat)) == set(FORMATS)


def test_the_fingerprint_changes_with_any_word(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {n}\n" for n in range(1000)))
    before = File(path=str(path)).open().train.fingerprint
    assert File(path=str(path)).open().train.fingerprint == before
    path.write_text(path.read_text().replace("line 500", "lime 500"))
    assert File(path=str(path)).open().train.fingerprint != before


def test_a_mixture_has_exact_shares_and_takes_the_examples_of_each_source_once():
    sources = tuple(Generated(name, lambda index, name=name: {"text": f"{name} {index}"}) for name in "abc")
    mixture = Mixture(sources, (3.0, 1.0, 1.0), seed=5)
    for block in range(2):
        found = [mixture.example(index)["text"] for index in range(block * BLOCK, (block + 1) * BLOCK)]
        for name, count in zip("abc", (600, 200, 200), strict=True):
            assert {text for text in found if text[0] == name} == {f"{name} {block * count + i}" for i in range(count)}
        assert len({text[0] for text in found[:20]}) > 1  # mixed, not concatenated
    assert mixture.example(3) == mixture.example(3)


def test_a_mixture_of_sources_has_a_held_out_mixture():
    train, held_out = open_sources((WorldStories(), Pydoc(weight=0.5)), seed=5, hold_out=True)
    assert held_out is not None and "pydoc" in held_out.name and train.fingerprint != held_out.fingerprint
    assert {frozenset(train.example(index)) for index in range(20)} == {frozenset({"spans"}), frozenset({"text"})}


def test_the_digits_are_those_of_scikit_learn() -> None:
    data = load_digits()
    images = ((data.images / 16 - 0.5) / 0.5).astype(np.float32)
    expected = {(image.tobytes(), int(label)) for image, label in zip(images, data.target, strict=True)}
    read = list(first_epoch(Digits().open(hold_out=False).train, 5000))
    assert len(read) == 1797 and {(each["image"].tobytes(), each["label"]) for each in read} == expected
    assert read[0]["image"].shape == (1, 8, 8)
