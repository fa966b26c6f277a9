"""Sources are infinite, deterministic and split by content; invalid files are refused."""

import json
from itertools import pairwise

import pytest

from regard.data.sources import WorldSource, folder, jsonl, pydoc, split_lines, text_file, world
from regard.data.world import story
from regard.text.chat import DEFAULT_TEMPLATE, render


def text_of(document):
    return "".join(span.text for span in document)


def epoch(source, number=0):
    size = len(source.documents)
    return [text_of(source.document(index)) for index in range(number * size, (number + 1) * size)]


def test_a_story_equals_the_conversation_of_the_chat_template():
    expected = story(0, 1, "held-out")
    document = WorldSource(split="held-out").document(0)
    messages = []
    for number, question in enumerate(expected.questions):
        content = f"{expected.text} {question.text}" if number == 0 else question.text
        messages += [{"role": "user", "content": content}, {"role": "assistant", "content": question.answer}]
    assert text_of(document) == render(DEFAULT_TEMPLATE, messages, add_generation_prompt=False)


def test_only_answers_and_their_end_tokens_have_weight_one():
    document = world().document(3)
    for previous, span in pairwise(document):
        assert (span.weight == 1.0) == (previous.text == "<|assistant|>" or span.text == "<|end|>")


def test_different_seeds_have_different_stories():
    assert world(seed=1).document(0) != world(seed=2).document(0)
    assert world(seed=1).document(5) == world(seed=1).document(5)


def test_the_splits_of_pydoc_are_disjoint():
    parts = {split: set(epoch(pydoc(split))) for split in ("train", "held-out")}
    assert not parts["train"] & parts["held-out"]
    assert len(parts["train"]) > 4 * len(parts["held-out"]) > 0
    assert all(text.endswith("<|end|>") for text in parts["train"])


def test_each_epoch_has_every_document_in_a_new_order():
    source = pydoc()
    first, second = epoch(source), epoch(source, 1)
    assert sorted(first) == sorted(second)
    assert first != second
    assert epoch(source) == first


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_chunks_concatenate_to_the_text_and_end_with_lines(size):
    text = "one\ntwo three\n\nfour five six seven"
    chunks = list(split_lines(text, size))
    assert "".join(chunks) == text
    assert max(map(len, chunks)) <= size
    if size == 1000:
        assert chunks[0].endswith("\n")


def test_text_files_and_folders_are_read_completely(tmp_path):
    lines = [f"line {number} of the text\n" * 300 for number in range(40)]
    (tmp_path / "all.txt").write_text("".join(lines))
    whole = epoch(text_file(tmp_path / "all.txt")) + epoch(text_file(tmp_path / "all.txt", "held-out"))
    assert sum(map(len, whole)) == len("".join(lines))
    for number, line in enumerate(lines):
        (tmp_path / f"{number}.md").write_text(line)
    files = epoch(folder(tmp_path, pattern="*.md")) + epoch(folder(tmp_path, "held-out", pattern="*.md"))
    assert sorted(files) == sorted(f"{line}<|end|>" for line in lines)


def test_jsonl_reads_text_and_messages(tmp_path):
    path = tmp_path / "rows.jsonl"
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    rows = [{"text": f"text {number}"} for number in range(20)] + [{"messages": messages}] * 3
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    documents = jsonl(path).documents + jsonl(path, "held-out").documents
    assert len(documents) == 23
    chat = next(document for document in documents if document[0].text == "<|user|>")
    assert [(span.text, span.weight) for span in chat if not span.special] == [(" hi", 0.0), (" yes", 1.0)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not valid JSON"),
        ("[1]", "line 2: expected an object"),
        ('{"text": 5}', "line 2: expected an object"),
        ('{"messages": [{"role": "wizard", "content": "x"}]}', "line 2: a message needs `role`"),
    ],
)
def test_an_invalid_line_is_reported_with_its_number(tmp_path, line, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"text": "good"}}\n{line}\n')
    with pytest.raises(ValueError, match=message):
        jsonl(path)


def test_unreadable_files_and_empty_splits_are_refused(tmp_path):
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    with pytest.raises(ValueError, match="not UTF-8"):
        text_file(tmp_path / "latin.txt")
    with pytest.raises(FileNotFoundError, match="check the path"):
        text_file(tmp_path / "none.txt")
    with pytest.raises(ValueError, match="no file that matches .* other files are not read"):
        folder(tmp_path / "empty")
    (tmp_path / "tiny.txt").write_text("x")
    with pytest.raises(ValueError, match="none of its 1 documents"):
        text_file(tmp_path / "tiny.txt", "held-out")
    with pytest.raises(ValueError, match="choose one of train, held-out"):
        text_file(tmp_path / "tiny.txt", "test")
