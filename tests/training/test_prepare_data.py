"""Training on prepared data has the batches of training on the data itself."""

import json
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.data.batch import Batch
from regard.data.loader import Loader
from regard.data.prepare import PreparationListener
from regard.data.shards import PreparedError
from regard.spec import SpecError
from regard.text.tokenizer import Tokenizer
from regard.training.overrides import override
from regard.training.prepare_data import prepare_recipe
from regard.training.recipe import ResolvedRecipe, find_recipe, read_recipe, resolve

TEXT = "".join(f"Line {number} has a number, {number * number}, and an end.\n" for number in range(300))
CHATS = [
    {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n * n}."}]}
    for n in range(60)
]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [{"text": "plain"}, *CHATS]))
    return tmp_path


@pytest.fixture(autouse=True)
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Syncing to disk takes most of the time, and matters only if the machine fails."""
    monkeypatch.setattr("os.fsync", lambda handle: None)


def tables(data: Mapping[str, Any], **other: Any) -> dict[str, Any]:
    settings = {"rows": 3, "length": 48, "held_out": 2, **data}
    train, tokenizer = {"steps": 3, "schedule": {"kind": "constant"}}, {"by": "bpe", "size": 300}
    recipe = read_recipe(find_recipe("llama"), {"model.width": 24, "model.context": 64})
    return recipe | {"data": settings, "train": train, "tokenizer": tokenizer} | other


def batches(resolved: ResolvedRecipe, held_out: bool = False, count: int = 12) -> list[Batch]:
    recipe, tokenizer, splits = resolved
    data, examples = recipe.data, splits.held_out if held_out else splits.train
    return list(islice(Loader(examples, recipe.objective, tokenizer, data.rows, data.length, data.seed), count))


def assert_same(left: list[Batch], right: list[Batch]) -> None:
    for one, other in zip(left, right, strict=True):
        assert one.fields == other.fields
        assert all(torch.equal(one[name], other[name]) and one[name].dtype == other[name].dtype for name in one)


DATA = {
    "text": lambda files: {"path": str(files / "a.txt")},
    "chats": lambda files: {"path": str(files / "b.jsonl"), "seed": 5},
    "no held-out part": lambda files: {"path": str(files / "b.jsonl"), "held_out": 0},
    "mixture": lambda files: {
        "sources": [
            {"kind": "file", "path": str(files / "a.txt"), "weight": 3.0},
            {"kind": "file", "path": str(files / "b.jsonl")},
        ]
    },
}


@pytest.mark.parametrize("name", DATA)
def test_prepared_data_has_the_same_batches(name: str, files: Path) -> None:
    plain = resolve(tables(DATA[name](files)))
    prepare_recipe(plain, files / "out")
    prepared = resolve(read_recipe(files / "out" / "recipe.toml"))
    assert prepared.recipe.model == plain.recipe.model and prepared.recipe.train == plain.recipe.train
    assert_same(batches(plain), batches(prepared))
    assert (plain.splits.held_out is None) == (prepared.splits.held_out is None)
    if plain.splits.held_out is not None:
        assert_same(batches(plain, held_out=True), batches(prepared, held_out=True))


def test_an_endless_source_needs_a_number_of_examples(files: Path) -> None:
    resolved = resolve(tables({"source": "world"}))
    with pytest.raises(SpecError, match="is endless; choose the number of examples"):
        prepare_recipe(resolved, files / "out")
    train, held_out = prepare_recipe(resolved, files / "out", examples=40)
    assert (len(train), len(held_out)) == (40, 4)
    ids = resolved.recipe.objective.tokenize(resolved.splits.train.example(7), resolved.tokenizer)
    assert train[7]["ids"].tolist() == ids["ids"].tolist() and train[7]["weights"].tolist() == ids["weights"].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("source", ["file", "world"])
def test_processes_do_not_change_the_files(source: str, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.data.prepare.MIN_PER_SHARD", 20)
    resolved = resolve(tables({"source": "world"} if source == "world" else {"path": str(files / "a.txt")}))
    one, two = (prepare_recipe(resolved, files / str(n), n, 50) for n in (1, 2))
    assert len(one[0].shards) > 1
    assert [shards.fingerprint for shards in one] == [shards.fingerprint for shards in two]


def test_another_tokenizer_or_objective_is_refused(files: Path) -> None:
    prepare_recipe(resolve(tables({"path": str(files / "b.jsonl")})), files / "out")
    prepared = read_recipe(files / "out" / "recipe.toml")
    other = resolve(prepared | {"tokenizer": {"by": "byte"}})
    with pytest.raises(SpecError, match="prepared with another tokenizer; train with the recipe"):
        batches(other)
    everything = resolve(override(prepared, {"objective.train_on": "all"}))
    with pytest.raises(SpecError, match="prepared with another objective"):
        batches(everything)
    with pytest.raises(SpecError, match="prepared already"):
        prepare_recipe(resolve(prepared), files / "again")


def test_changed_data_and_other_folders_are_refused(files: Path) -> None:
    prepare_recipe(resolve(tables({"path": str(files / "a.txt")})), files / "out")
    (files / "a.txt").write_text(TEXT.replace("Line 7 ", "Line 8 "))
    tokenizer = Tokenizer.load(files / "out" / "tokenizer")
    with pytest.raises(PreparedError, match="prepared with another source"):
        prepare_recipe(resolve(tables({"path": str(files / "a.txt")}), tokenizer), files / "out")
    with pytest.raises(ValueError, match=r"has (a.txt|b.jsonl), which regard data prepare did not write"):
        prepare_recipe(resolve(tables({"path": str(files / "a.txt")})), files)


def test_an_interrupted_call_is_continued(files: Path) -> None:
    class Stop(PreparationListener):
        def advanced(self, examples: int, tokens: int) -> None:
            raise KeyboardInterrupt

    resolved = resolve(tables({"path": str(files / "a.txt")}))
    with pytest.raises(KeyboardInterrupt):
        prepare_recipe(resolved, files / "out", listener=Stop())
    assert not (files / "out" / "recipe.toml").exists()
    prepare_recipe(resolved, files / "out")
    assert_same(batches(resolved), batches(resolve(read_recipe(files / "out" / "recipe.toml"))))
