"""Prepared shards: exact, independent of the number of processes, resumable after any kill, and checked for damage."""

import json
import pickle
import random
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from regard.data.prepare import PreparationListener, locked, prepare
from regard.data.readers import read_examples
from regard.data.shards import PREPARED, PreparedError, ShardedExamples
from tests.data.preparation import Numbers, contents, encode, encode_until_17, write

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_sync(monkeypatch):
    """Syncing to disk takes most of the time, and matters only if the machine fails."""
    monkeypatch.setattr("os.fsync", lambda handle: None)


def assert_equal(prepared: ShardedExamples, index: int, example: int) -> None:
    found = prepared[index]
    expected = {name: values for name, values in encode(example).items() if len(values) or name != "weights"}
    assert set(found) == set(expected)
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values)
        assert found[name].dtype.kind in ("f" if name == "weights" else "iu")


def test_examples_are_those_that_were_encoded(tmp_path):
    prepared = write(tmp_path / "out")
    for index in range(60):
        assert_equal(prepared, index, index)
    assert_equal(prepared, -1, 59)
    assert len(prepared) == len(list(prepared)) == 60 and len(prepared[10:13]) == 3
    with pytest.raises(IndexError, match="60 examples"):
        prepared[60]
    lengths = [len(encode(number)["tokens"]) for number in range(60)]
    assert prepared.lengths("tokens").tolist() == lengths and prepared.tokens == sum(lengths) and 0 in lengths
    assert [shard["examples"] for shard in prepared.shards] == [16, 16, 16, 12]
    assert prepared.fingerprints == {"source": "numbers"}
    prepared.verify()


def test_arrays_are_views_of_the_files_and_survive_pickling(tmp_path):
    prepared = write(tmp_path / "out")
    tokens = prepared[3]["tokens"]
    assert len(tokens) and not tokens.flags.owndata and not tokens.flags.writeable
    assert_equal(pickle.loads(pickle.dumps(prepared)), 20, 20)


def test_the_files_do_not_depend_on_the_number_of_processes(tmp_path):
    for processes in (1, 2, 3):
        write(tmp_path / str(processes), processes=processes)
    assert contents(tmp_path / "1") == contents(tmp_path / "2") == contents(tmp_path / "3")


def test_the_number_of_shards_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("regard.data.prepare.MAX_SHARDS", 8)
    monkeypatch.setattr("regard.data.prepare.MIN_PER_SHARD", 5)
    for count, shards in ((4, 1), (11, 3), (40, 8), (41, 7), (400, 8)):
        prepared = prepare(Numbers(count), encode, tmp_path / str(count), {})
        assert len(prepared.shards) == shards and len(prepared) == count
        assert_equal(prepared, count - 1, count - 1)


@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_a_kill_at_any_event_leaves_a_folder_that_is_completed_exactly(every, tmp_path):
    command = [sys.executable, "-m", "tests.data.preparation", "kill-all", str(tmp_path), str(every)]
    result = subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": "src"}, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) * every > 150


def test_a_killed_call_with_processes_is_completed_exactly(tmp_path):
    command = [sys.executable, "-m", "tests.data.preparation", "kill-parent", str(tmp_path / "killed")]
    result = subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": "src"}, capture_output=True, text=True)
    assert result.returncode == -9, result.stderr
    assert not (tmp_path / "killed" / PREPARED).exists()
    write(tmp_path / "killed", count=2000, per_shard=100)
    write(tmp_path / "undisturbed", count=2000, per_shard=100)
    assert contents(tmp_path / "killed") == contents(tmp_path / "undisturbed")


class Recorder(PreparationListener):
    def __init__(self):
        self.notes, self.done, self.examples, self.tokens = [], 0, 0, 0

    def started(self, done, total):
        self.done, self.total = done, total

    def advanced(self, examples, tokens):
        self.examples, self.tokens = self.examples + examples, self.tokens + tokens

    def note(self, text):
        self.notes.append(text)


@pytest.mark.parametrize("processes", [1, 2])
def test_finished_shards_are_kept_and_the_listener_counts_the_rest(processes, tmp_path):
    everything = Recorder()
    prepared = write(tmp_path / "out", listener=everything)
    assert (everything.done, everything.examples, everything.tokens) == (0, 60, prepared.tokens)
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "shard-00000").iterdir()}
    for number in (1, 2):
        (tmp_path / "out" / f"shard-0000{number}" / "shard.json").unlink()
    rest = Recorder()
    write(tmp_path / "out", listener=rest, processes=processes)
    assert (rest.done, rest.total, rest.examples) == (28, 60, 32) and len(rest.notes) == 2
    assert {path: path.stat().st_mtime_ns for path in times} == times


def damage(file: Path, kind: str, draw: random.Random) -> None:
    data = bytearray(file.read_bytes())
    if kind == "flip":
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    file.unlink() if kind == "delete" else file.write_bytes(
        {"flip": data, "cut": data[:-2], "extend": data + b"\0", "empty": b""}[kind]
    )


@pytest.mark.parametrize("kind", ["flip", "cut", "extend", "empty", "delete"])
def test_every_damage_is_detected_and_repaired(kind, tmp_path):
    draw, out = random.Random(kind), tmp_path / "out"
    write(out)
    expected = contents(out)
    for name in [*expected] + 20 * [PREPARED]:
        content = (out / name).read_bytes()
        damage(out / name, kind, draw)
        if name.endswith("shard.json") or same_json(out / name, content):
            pass  # readers do not need the former; else white space was damaged
        else:
            with pytest.raises(PreparedError, match=r"damaged|no prepared.json"):
                ShardedExamples(out).verify()
            if kind != "flip":
                with pytest.raises(PreparedError):  # a wrong size is found without reading the files
                    ShardedExamples(out)
        write(out)
        if same_json(out / name, content):
            (out / name).write_bytes(content)
        assert contents(out) == expected, name


def same_json(file: Path, content: bytes) -> bool:
    try:
        return json.loads(file.read_bytes()) == json.loads(content)
    except (OSError, ValueError):
        return False


def test_other_settings_other_files_and_a_second_writer_are_refused(tmp_path):
    write(tmp_path / "out")
    with pytest.raises(PreparedError, match="prepared with another source; choose another folder"):
        prepare(Numbers(60), encode, tmp_path / "out", {"source": "other"}, per_shard=16)
    with pytest.raises(PreparedError, match="prepared with examples=60"):
        prepare(Numbers(61), encode, tmp_path / "out", {"source": "numbers"}, per_shard=16)
    with locked(tmp_path / "out"), pytest.raises(PreparedError, match="another process writes"):
        write(tmp_path / "out")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(PreparedError, match="has thesis.txt"):
        write(tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").exists()


@pytest.mark.parametrize("processes", [1, 2])
def test_an_error_names_the_example_and_keeps_finished_shards(processes, tmp_path):
    arguments = (tmp_path / "out", {"source": "numbers"}, None, processes, 16)
    with pytest.raises(PreparedError, match="example 17: seventeen"):
        prepare(Numbers(60), encode_until_17, *arguments)
    prepare(Numbers(60), encode, *arguments)
    write(tmp_path / "undisturbed")
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")


def encode_text(example):
    if "text" not in example:
        raise ValueError("'text' is missing")
    return {"ids": np.frombuffer(example["text"].encode(), np.uint8)}


def test_an_error_names_the_line_of_a_file(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"n": [1]}\n\n{"n": [[70000]]}\n')
    examples = read_examples(tmp_path / "a.jsonl")
    with pytest.raises(PreparedError, match="a.jsonl, line 1: 'text' is missing"):
        prepare(examples, encode_text, tmp_path / "out", {})
    with pytest.raises(PreparedError, match=r"a.jsonl, line 3: the column 'x' has the shape \(1, 1\)"):
        prepare(examples, lambda example: {"x": np.array(example["n"])}, tmp_path / "out", {})


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ([{"x": np.zeros((2, 2))}], r"example 0: the column 'x' has the shape \(2, 2\)"),
        ([{"x": np.array(["a"])}], "dtype str"),
        ([{"x": np.zeros(2, np.float16)}], "dtype float16"),
        ([{"../x": np.zeros(2)}], "cannot be the name of a file"),
        ([{"x": np.zeros(2)}, {"x": np.zeros(2, int)}], "example 1: the column 'x' is int64 here and float64 in other"),
        ([], "no examples"),
    ],
)
def test_columns_that_cannot_be_stored_are_refused(columns, message, tmp_path):
    with pytest.raises(PreparedError, match=message):
        prepare(columns, lambda example: example, tmp_path / "out", {})


def test_a_folder_without_its_description_is_not_prepared(tmp_path):
    with pytest.raises(PreparedError, match=r"no prepared.json.*run regard data prepare"):
        ShardedExamples(tmp_path)


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([255], "uint8"), ([256], "uint16"), ([65_535], "uint16"), ([65_536], "uint32"), ([2**32], "int64"),
        ([-1], "int8"), ([-1, 128], "int16"), ([-100, 70_000], "int32"), ([-(2**40)], "int64"), ([], "uint8"),
    ],
)  # fmt: skip
def test_integers_are_stored_in_the_smallest_dtype(values, dtype, tmp_path):
    examples = [np.arange(5), np.array(values, np.int64), np.arange(3)]
    prepared = prepare(examples, lambda example: {"ids": example}, tmp_path / "out", {})
    assert [example["ids"].tolist() for example in prepared] == [example.tolist() for example in examples]
    assert prepared[0]["ids"].dtype == dtype
    assert (tmp_path / "out" / "shard-00000" / "ids.bin").stat().st_size == (8 + len(values)) * np.dtype(dtype).itemsize
    prepared.verify()


@pytest.mark.parametrize("distinct", [1, 3, 256, 257, 5000])
def test_few_distinct_weights_are_stored_as_codes(distinct, tmp_path):
    rng = np.random.default_rng(0)
    special = np.array([0.0, -0.0, np.nan, np.inf, 0.1], np.float32)
    choices = np.concatenate([special, rng.random(distinct)])[:distinct].astype(np.float32)
    weights = [choices] + [rng.choice(choices, size) for size in (0, 1, 700)] + [choices[::-1]]
    prepared = prepare(weights, lambda values: {"weights": values}, tmp_path / "out", {}, per_shard=3)
    for found, expected in zip(prepared, weights, strict=True):
        np.testing.assert_array_equal(found["weights"].view(np.uint32), expected.view(np.uint32))
        assert found["weights"].dtype == np.float32
    size = 1 if distinct <= 256 else 4
    assert (tmp_path / "out" / "shard-00001" / "weights.bin").stat().st_size == size * (700 + distinct)
    prepared.verify()


def test_memory_does_not_grow_with_the_data(tmp_path):
    with (tmp_path / "a.jsonl").open("w") as stream:
        for number in range(2500):
            stream.write(json.dumps({"text": (f"{number:05} " * 4000)[:20_000]}) + "\n")  # 50 MB in all
    examples = read_examples(tmp_path / "a.jsonl")
    tracemalloc.start()
    prepared = prepare(examples, encode_text, tmp_path / "out", {})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert prepared.tokens == 2500 * 20_000 and bytes(prepared[1777]["ids"]).startswith(b"01777 01777")
    assert peak < 8 << 20, f"{peak / 2**20:.0f} MiB"
