"""A run is resumed only with its own config, tokenizer, checkpoints and data, wherever its directory is."""

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from regard.checkpoint.atomic_folder import CheckpointError
from regard.data.loader import Loader
from regard.data.sources.files import File
from regard.objectives.next_token import NextToken
from regard.training.run import Run, read_training
from tests.training.tiny import SETTINGS, TOKENIZER, outcome, trainer


def run_with_tokenizer(path: Path) -> Path:
    Run.create(path, {"train": SETTINGS.to_dict()}, TOKENIZER)
    trainer(path).train()
    return path


def test_every_checkpoint_holds_the_identity_of_its_run_and_data(tmp_path: Path) -> None:
    run = Run(run_with_tokenizer(tmp_path / "a"))
    saved = read_training(run.checkpoints[0])
    assert saved["run"] == run.stamp()["run"] and set(saved["run"]) == {"id", "config", "tokenizer"}
    assert saved["loader"]["fingerprint"] == trainer(tmp_path / "a").loader.examples.fingerprint
    other = Run(run_with_tokenizer(tmp_path / "b")).stamp()["run"]
    assert other["config"] == saved["run"]["config"] and other["tokenizer"] == saved["run"]["tokenizer"]
    assert other["id"] != saved["run"]["id"]


@pytest.mark.parametrize(
    "file", ["config.json", "run.json", "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"]
)
def test_a_flipped_bit_in_the_files_of_a_run_is_detected(tmp_path: Path, file: str) -> None:
    path = run_with_tokenizer(tmp_path / "run")
    content, rng = (path / file).read_bytes(), random.Random(file)
    for _ in range(50):
        data = bytearray(content)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        (path / file).write_bytes(data)
        with pytest.raises(CheckpointError, match=r"run\.json|" + file):
            Run(path).check_files()
            Run(path).latest()
    with pytest.raises(CheckpointError, match=r"run\.json|" + file):
        trainer(path).train()
    (path / file).unlink()
    if file == "config.json":
        with pytest.raises(ValueError, match="holds no run"):
            Run.open(path)
    else:
        with pytest.raises(CheckpointError, match="missing"):
            trainer(path).train()
    (path / file).write_bytes(content)
    assert trainer(path).train().finished


def test_a_checkpoint_of_another_run_is_not_used(tmp_path: Path) -> None:
    for name in ("mine", "other", "undisturbed"):
        trainer(tmp_path / name, replace(SETTINGS, lr=1e-3) if name == "other" else SETTINGS).train()
    mine, other = tmp_path / "mine" / "checkpoints", tmp_path / "other" / "checkpoints"
    shutil.rmtree(mine / "step-000010")
    shutil.copytree(other / "step-000010", mine / "step-000010")
    notes = []
    assert Run(tmp_path / "mine").latest(notes.append).name == "step-000009"
    assert "belongs to another run" in notes[0]
    trainer(tmp_path / "mine").train()
    assert outcome(tmp_path / "mine") == outcome(tmp_path / "undisturbed")
    shutil.rmtree(mine / "step-000009")
    shutil.rmtree(mine / "step-000010")
    shutil.copytree(other / "step-000010", mine / "step-000010")
    with pytest.raises(CheckpointError, match="belongs to another run"):
        trainer(tmp_path / "mine").train()


def test_a_run_can_be_moved(tmp_path: Path) -> None:
    trainer(tmp_path / "undisturbed").train()
    trainer(tmp_path / "first").train()
    shutil.rmtree(tmp_path / "first" / "checkpoints" / "step-000010")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "first").rename(tmp_path / "elsewhere" / "second")
    trainer(tmp_path / "elsewhere" / "second").train()
    assert outcome(tmp_path / "elsewhere" / "second") == outcome(tmp_path / "undisturbed")


def text(words: int, seed: int = 0) -> str:
    rng = random.Random(seed)
    lines = (" ".join(rng.choice(("barn", "Anna", "walks", "sleeps")) for _ in range(12)) for _ in range(words // 12))
    return "\n".join(lines)


def appended(original: str) -> str:
    return original + text(2000, seed=1)


def replaced(original: str) -> str:
    return original.replace("Anna", "Bert", 1)


@pytest.mark.parametrize("change", [appended, replaced])
def test_changed_data_is_refused(tmp_path: Path, change) -> None:
    file, path = tmp_path / "my.txt", tmp_path / "run"
    original = text(50_000)
    file.write_text(original)

    def data() -> Loader:
        return Loader(File(path=str(file)).open().train, NextToken(), TOKENIZER, rows=4, length=24)

    trainer(path, replace(SETTINGS, steps=3), loader=data()).train()
    before = (path / "metrics.jsonl").read_bytes()
    file.write_text(change(original))
    with pytest.raises(ValueError, match=r"the data of .*my\.txt.* changed after .*restore the files.*start a new run"):
        trainer(path, loader=data()).train()
    assert (path / "metrics.jsonl").read_bytes() == before
    file.write_text(original)
    assert trainer(path, loader=data()).train().step == 10


def test_a_run_is_created_completely_or_not_at_all(tmp_path: Path, monkeypatch) -> None:
    """A kill after any of the files leaves a directory in which the run can be created."""

    class Tokenizer:
        def save(self, folder: Path) -> None:
            folder.mkdir()
            (folder / "tokenizer.json").write_text("{}")

    import regard.training.run as module

    def killed(path: Path, content: bytes) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "write_file", killed)
    with pytest.raises(KeyboardInterrupt):
        Run.create(tmp_path, {"train": {}}, Tokenizer())
    with pytest.raises(ValueError, match="holds no run"):
        Run.open(tmp_path)
    monkeypatch.undo()
    Run.create(tmp_path, {"train": {}}, Tokenizer()).check_files()
    assert json.loads((tmp_path / "run.json").read_text())["files"].keys() == {
        "config.json",
        "tokenizer/tokenizer.json",
    }
