"""Files of every format give the examples that a plain reading gives; faults name the file and the line."""

import csv
import gzip
import json
import os
import pickle
import random
import sys
import tracemalloc
from pathlib import Path

import pytest

from regard.data import file_index
from regard.data.file_index import FileError
from regard.data.readers import FORMATS, SUFFIXES, fingerprint_file, read_examples

SHORT = "".join(f"Line {number} of a short text.\n" for number in range(80))  # 2 KB


def texts(path: Path, format: str | None = None) -> list[str]:
    return [example["text"] for example in read_examples(path, format)]


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def random_text(seed: int, lines: int = 60) -> str:
    """Lines of random lengths, some blank, some of spaces, with characters of one to four bytes."""
    draw = random.Random(seed)
    text = "".join("".join(draw.choices("ab é漢🙂\t", k=draw.choice((0, 0, 1, 5, 30)))) + "\n" for _ in range(lines))
    return text if seed % 2 else text.rstrip("\n")


@pytest.mark.parametrize("block", [1, 3, 64, 1 << 20])
@pytest.mark.parametrize("seed", range(4))
def test_lines_and_paragraphs_equal_those_of_a_plain_loop(seed, block, tmp_path, monkeypatch):
    monkeypatch.setattr(file_index, "BLOCK_BYTES", block)
    text = random_text(seed)
    path = write(tmp_path / "a.txt", text)
    lines = text.split("\n")
    assert texts(path, "lines") == [line for line in lines if line.strip()]
    paragraphs = [[]]
    for line in lines:
        paragraphs = [*paragraphs[:-1], paragraphs[-1] + [line]] if line.strip() else [*paragraphs, []]
    assert texts(path, "paragraphs") == ["\n".join(paragraph) for paragraph in paragraphs if paragraph]


@pytest.mark.parametrize("text", [SHORT, random_text(1), "x" * 5000, "漢" * 5000, "one line", "a\n" * 9000])
def test_chunks_concatenate_to_the_text_and_end_with_lines(text, tmp_path):
    chunks = texts(write(tmp_path / "a.txt", text))
    assert "".join(chunks) == text
    assert all(len(chunk.encode()) <= 4000 for chunk in chunks)
    assert all(chunk.endswith("\n") for chunk in chunks[:-1]) or "\n" not in text


@pytest.mark.parametrize("size", [1000, 2000, 4000, 16_000])
def test_a_small_text_has_several_chunks(size, tmp_path):
    assert len(texts(write(tmp_path / "a.txt", (SHORT * 8)[:size]))) >= 7


def test_ends_of_lines_and_byte_order_marks_of_other_systems_are_removed(tmp_path):
    assert texts(write(tmp_path / "a.txt", b"\xef\xbb\xbfone\r\ntwo\r\n"), "lines") == ["one", "two"]
    assert texts(write(tmp_path / "b.txt", b"\xef\xbb\xbfone\r\ntwo\r\n")) == ["one\ntwo\n"]
    assert read_examples(write(tmp_path / "c.jsonl", b'\xef\xbb\xbf{"a": 1}\r\n'))[0] == {"a": 1}
    assert read_examples(write(tmp_path / "d.json", b'\xef\xbb\xbf [{"a": 1}]'))[0] == {"a": 1}
    assert read_examples(write(tmp_path / "e.csv", b"\xef\xbb\xbfa,b\r\n1,2\r\n"))[0] == {"a": "1", "b": "2"}


ROWS = [
    {"text": "é}, {\"\\", "label": 3, "nested": [{"a": None}, "]"]},
    {"text": "\n\u2028x", "label": -1, "nested": []},
    {"text": "", "label": 0, "nested": [[1.5]]},
] * 5  # fmt: skip


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("block", [1, 5, 1 << 20])
def test_json_arrays_equal_those_of_the_json_module(block, indent, tmp_path, monkeypatch):
    monkeypatch.setattr(file_index, "BLOCK_BYTES", block)
    path = write(tmp_path / "a.json", json.dumps(ROWS, indent=indent, ensure_ascii=False))
    examples = read_examples(path)
    assert list(examples) == ROWS and len(examples) == 15
    assert examples[-1] == ROWS[-1] and examples[2:4] == ROWS[2:4]
    with pytest.raises(IndexError, match="15 examples"):
        examples[15]


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.json", "a.jsonl.gz"])
def test_json_lines_skip_blank_lines(name, tmp_path):
    content = "\n\n".join(json.dumps(row) for row in ROWS).encode() + b"\n  \n"
    examples = read_examples(write(tmp_path / name, gzip.compress(content) if name.endswith("gz") else content))
    assert list(examples) == ROWS
    assert examples.origin(2) == f"{tmp_path / name}, line 5"
    assert list(pickle.loads(pickle.dumps(examples))) == ROWS


def test_the_copy_of_a_compressed_file_is_deleted_with_the_examples(tmp_path):
    examples = read_examples(write(tmp_path / "a.txt.gz", gzip.compress(SHORT.encode())))
    copy = examples.files[0].stored
    assert copy.exists() and "".join(example["text"] for example in examples) == SHORT
    del examples
    assert not copy.exists()


@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_records_may_contain_delimiters_quotes_and_lines(suffix, tmp_path):
    rows = [
        {"text": 'a, "b"\tc', "label": "1"},
        {"text": "two\n\nlines\u2028", "label": ""},
        {"text": "x" * 200_000, "label": "3"},
    ]
    with (tmp_path / f"a.{suffix}").open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, ["text", "label"], delimiter={"csv": ",", "tsv": "\t"}[suffix])
        writer.writeheader()
        writer.writerows(rows)
        stream.write("\n")
    limit = csv.field_size_limit()
    examples = read_examples(tmp_path / f"a.{suffix}")
    assert list(examples) == rows and examples.origin(2).endswith("line 6")
    assert csv.field_size_limit() == limit


def test_columns_rename_fields(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"content": "a", "text": "b", "id": 1}\n')
    assert read_examples(path, columns={"text": "content"})[0] == {"text": "a", "id": 1}
    with pytest.raises(FileError, match=r"line 1: no column 'contents'.*did you mean 'content'"):
        read_examples(path, columns={"text": "contents"})


def test_a_folder_has_one_example_per_text_file_in_the_order_of_names(tmp_path):
    for name in ("b.txt", "a/x.md", "a/.hidden/y.txt", ".z.txt", "picture.png"):
        write(tmp_path / name, name)
    assert texts(tmp_path) == ["a/x.md", "b.txt"]
    assert texts(tmp_path, "lines") == ["a/x.md", "b.txt"]
    assert texts(tmp_path / "**" / "*.md") == ["a/x.md"]
    write(tmp_path / "c.jsonl", '{"text": 1}\n')
    with pytest.raises(FileError, match="formats jsonl, text"):
        read_examples(tmp_path)
    assert len(read_examples(tmp_path, "jsonl")) == 1
    with pytest.raises(FileError, match="no csv files"):
        read_examples(tmp_path, "csv")


def test_the_files_of_a_pattern_are_concatenated(tmp_path):
    for number in range(3):
        write(tmp_path / f"part-{number}.jsonl", "".join(f'{{"n": {number * 10 + n}}}\n' for n in range(number + 1)))
    examples = read_examples(tmp_path / "part-*.jsonl")
    assert [example["n"] for example in examples] == [0, 10, 11, 20, 21, 22]
    assert examples.origin(4) == f"{tmp_path / 'part-2.jsonl'}, line 2"
    with pytest.raises(FileNotFoundError, match="no file matches"):
        read_examples(tmp_path / "*.csv")


FAULTS = {
    "a.jsonl": (b'{"a": 1}\n\n{"a": }\n', "a.jsonl, line 3: not valid JSON"),
    "b.jsonl": (b'{"a": 1}\n[2]\n', "b.jsonl, line 2: expected an object"),
    "c.jsonl": (b'{"a": 1}\n{"a": "\xff"}\n', "c.jsonl, line 2: not UTF-8"),
    "d.jsonl": (b"[" * 100_000 + b"\n", "d.jsonl, line 1: JSON that is nested too deeply"),
    "a.txt": (b"one\ntwo\n\xc3(\n", "a.txt, line 3: not UTF-8"),
    "b.txt": (b"", "b.txt is empty"),
    "c.txt": (b" \n", "c.txt is empty"),
    "blank.txt": (b" \n" * 5000, "blank.txt is empty"),
    "a.json": (b'[{"a": 1},\n{"a" 1}]', "a.json, line 2: not valid JSON"),
    "b.json": (b'[{"a": 1}\n{"a": 1}]', "b.json, line 2: expected ',' or ']'"),
    "c.json": (b'[{"a": 1},\n3]', "c.json, line 2: expected an object"),
    "d.json": (b'[{"a": 1},\n{"a": 1', "d.json, line 2: not valid JSON"),
    "e.json": (b'[{"a": 1}', "e.json, line 1: expected ',' or ']'"),
    "f.json": (b'"text"', "f.json: expected a JSON array"),
    "g.json": (b"[]", "g.json is empty"),
    "a.csv": (b"a,b\n1,2\n3\n", r"a.csv, line 3: 1 values for 2 columns \(a, b\)"),
    "b.csv": (b'a,b\n1,"2\n', "b.csv, line 2: not valid CSV"),
    "c.csv": (b"a,a\n1,2\n", "c.csv, line 1: the names .* must differ"),
    "d.csv": (b"a,b\n1,\xff\n", "d.csv, line 2: not UTF-8"),
    "e.csv": (b"a,b\n", "e.csv is empty"),
    "a.jsonl.gz": (gzip.compress(b'{"a": 1}\n')[:-9], "a.jsonl.gz is not a complete gzip file"),
    "b.jsonl.gz": (gzip.compress(b'{"a": 1}\n{\n'), "b.jsonl.gz, line 2: not valid JSON"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_name_the_file_and_the_line(name, tmp_path):
    content, message = FAULTS[name]
    path = write(tmp_path / name, content)
    with pytest.raises(FileError, match=message):
        list(read_examples(path))


def test_missing_files_and_wrong_formats_are_refused(tmp_path):
    write(tmp_path / "chats.jsonl", '{"a": 1}\n')
    with pytest.raises(FileNotFoundError, match=r"chat.jsonl is not a file or folder; did you mean .*chats.jsonl"):
        read_examples(tmp_path / "chat.jsonl")
    with pytest.raises(ValueError, match="did you mean 'jsonl'"):
        read_examples(tmp_path / "chats.jsonl", "jsnl")
    with pytest.raises(FileError, match="reads folders"):
        read_examples(tmp_path / "chats.jsonl", "dataset")
    assert set(SUFFIXES.values()) < set(FORMATS)


def test_a_file_that_changes_after_opening_is_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"a": 1}\n')
    examples = read_examples(path)
    write(path, '{"a": 1}\n{"a": 2}\n')
    with pytest.raises(FileError, match="was changed"):
        examples[0]


def test_another_file_of_the_same_size_is_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"a": 1}\n')
    examples = read_examples(path)
    write(path, '{"a": 2}\n')
    os.utime(path, ns=(0, 0))
    for read in (lambda: examples[0], lambda: list(examples)):
        with pytest.raises(FileError, match="was changed"):
            read()


def test_iteration_opens_a_file_once(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", '{"a": 1}\n\n{"a": 2}\n' * 50)
    examples, opened, plain_open = read_examples(path, columns={"b": "a"}), [], Path.open
    one_by_one = [examples[index] for index in range(len(examples))]
    monkeypatch.setattr(Path, "open", lambda file, *options: opened.append(file) or plain_open(file, *options))
    assert list(examples) == one_by_one and opened == [path]


def test_the_fingerprint_depends_on_contents_format_and_columns_only(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", '{"text": "a", "b": "c"}\n')
    fingerprint = read_examples(path).fingerprint
    assert read_examples(write(tmp_path / "moved.jsonl", path.read_bytes())).fingerprint == fingerprint
    assert read_examples(path, columns={"text": "b"}).fingerprint != fingerprint
    assert read_examples(path, "lines").fingerprint != fingerprint
    assert read_examples(write(path, '{"text": "a", "b": "d"}\n')).fingerprint != fingerprint
    monkeypatch.setattr("regard.data.readers.HASHED_BYTES", 10)
    monkeypatch.setattr("regard.data.readers.SAMPLE_BYTES", 4)
    sampled = fingerprint_file(path)
    assert fingerprint_file(path) == sampled != fingerprint_file(write(path, '{"text": "a", "b": "d"}\n '))


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.csv", "a.json"])
def test_memory_does_not_grow_with_the_file(name, tmp_path):
    line = {"a.jsonl": '{"text": "%s"}\n', "a.txt": "%s\n", "a.csv": "%s,x\n", "a.json": '{"text": "%s"},\n'}[name]
    with (tmp_path / name).open("w") as stream:
        stream.write({"a.csv": "text,y\n", "a.json": "["}.get(name, ""))
        for number in range(2500):
            stream.write(line % (f"{number} " * 10_000)[:20_000])  # 50 MB in all
        stream.write('{"text": ""}]' if name == "a.json" else "")
    tracemalloc.start()
    examples = read_examples(tmp_path / name)
    assert len(examples) >= 2500 and examples.fingerprint
    for index in range(0, len(examples), 100):
        assert isinstance(examples[index]["text"], str)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 << 20, f"{peak / 2**20:.0f} MiB"


def test_without_pyarrow_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for name in ("a.parquet", "a.arrow"):
        with pytest.raises(FileError, match=r"pip install 'regard\[data\]'"):
            read_examples(write(tmp_path / name, b"PAR1"))


def test_prepared_data_are_not_read_as_text(tmp_path):
    (tmp_path / "source-0").mkdir()
    (tmp_path / "source-0" / "prepared.json").write_text("{}")
    with pytest.raises(FileError, match="is prepared data; train with the recipe of its folder"):
        read_examples(tmp_path)


def test_conversations_of_other_formats_become_messages(tmp_path):
    question, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    own = {"prompt": "a", "instruction": "b", "output": "c"}
    cases = [
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "id": 7},
         {"messages": [question, answer], "id": 7}),
        ({"instruction": "a", "input": "", "output": "b"}, {"messages": [question, answer]}),
        ({"instruction": "a", "input": "x", "output": "b"}, {"messages": [{**question, "content": "a\n\nx"}, answer]}),
        ({"instruction": 1, "output": "b"}, {"instruction": 1, "output": "b"}),
        ({"conversations": ["a"]}, {"conversations": ["a"]}),
        (own, own),
    ]  # fmt: skip
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row, _ in cases))
    examples = read_examples(path)
    expected = [found for _, found in cases]
    assert list(examples) == expected == [examples[index] for index in range(len(examples))]
