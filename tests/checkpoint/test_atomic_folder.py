"""A folder is complete or absent, even if its writer is interrupted; every damage is detected and named."""

import errno
import json
import os
import random
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from regard.checkpoint.atomic_folder import MANIFEST, CheckpointError, check_folder, remove_folder, write_folder


def write_example(path: Path, text: str = "one") -> Path:
    with write_folder(path) as folder:
        (folder / "config.json").write_text(json.dumps({"text": text}))
        (folder / "weights.bin").write_bytes(random.Random(text).randbytes(5000))
        (folder / "inner").mkdir()
        (folder / "inner" / "notes.txt").write_text(text)
    return path


def checked_text(path: Path) -> str:
    check_folder(path)
    return (path / "inner" / "notes.txt").read_text()


def test_only_the_written_files_exist(tmp_path: Path) -> None:
    write_example(tmp_path / "deep" / "model")
    check_folder(tmp_path / "deep" / "model")
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["model"]
    assert set(json.loads((tmp_path / "deep" / "model" / MANIFEST).read_text())["files"]) == {
        "config.json",
        "weights.bin",
        "inner/notes.txt",
    }


def test_files_have_the_mode_of_the_umask(tmp_path: Path) -> None:
    umask = os.umask(0o027)
    try:
        with write_folder(tmp_path / "model") as folder:
            save_file({"x": torch.zeros(2)}, folder / "model.safetensors")
            (folder / "inner").mkdir()
            (folder / "inner" / "notes.txt").touch(0o600)
    finally:
        os.umask(umask)
    files = [path for path in (tmp_path / "model").rglob("*") if path.is_file()]
    assert len(files) == 3 and {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o640}
    check_folder(tmp_path / "model")


def test_an_existing_folder_is_replaced(tmp_path: Path) -> None:
    write_example(tmp_path / "model", "one")
    write_example(tmp_path / "model", "two")
    assert checked_text(tmp_path / "model") == "two"
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("fault", [OSError(errno.ENOSPC, "no space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("moment", ["body", "manifest"])
def test_an_error_leaves_the_old_folder(tmp_path: Path, monkeypatch, fault: BaseException, moment: str) -> None:
    write_example(tmp_path / "model", "one")

    def fail(*_: object) -> None:
        raise fault

    if moment == "manifest":
        monkeypatch.setattr("regard.checkpoint.atomic_folder.write_manifest", fail)
    with pytest.raises(type(fault)), write_folder(tmp_path / "model") as folder:
        (folder / "config.json").write_text("half")
        if moment == "body":
            fail()
    assert checked_text(tmp_path / "model") == "one"
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("renames", [0, 1])
def test_the_old_folder_is_recovered_after_a_kill_between_renames(tmp_path: Path, monkeypatch, renames: int) -> None:
    class Killed(BaseException):
        pass

    write_example(tmp_path / "model", "one")
    rename, renamed = Path.rename, []

    def rename_until_killed(self: Path, target: Path) -> Path:
        if len(renamed) == renames:
            raise Killed
        renamed.append(target)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", rename_until_killed)
    with pytest.raises(Killed):
        write_example(tmp_path / "model", "two")
    monkeypatch.undo()
    remaining = [p for p in (tmp_path / "model", tmp_path / ".model.old") if p.exists()]
    assert [checked_text(p) for p in remaining] == ["one"]
    with pytest.raises(RuntimeError), write_folder(tmp_path / "model"):
        assert checked_text(tmp_path / "model") == "one", "the next writer recovers it first"
        raise RuntimeError
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_remove_folder_leaves_nothing(tmp_path: Path) -> None:
    write_example(tmp_path / "model")
    (tmp_path / ".model.old").mkdir()
    remove_folder(tmp_path / "model")
    assert not list(tmp_path.iterdir())


def damage(path: Path, generator: random.Random) -> tuple[Path, str]:
    """Truncate, extend, flip a bit of, or delete one file; returns the file and the kind of damage."""
    file = generator.choice(sorted(p for p in path.rglob("*") if p.is_file()))
    data = bytearray(file.read_bytes())
    kind = generator.choice(["truncate", "flip", "delete", "grow"])
    if kind == "delete":
        file.unlink()
    elif kind == "truncate":
        file.write_bytes(data[: generator.randrange(len(data))])
    elif kind == "grow":
        file.write_bytes(data + generator.randbytes(generator.randint(1, 20)))
    else:
        data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        file.write_bytes(data)
    return file, kind


@pytest.mark.parametrize("trials", [200, pytest.param(3000, marks=pytest.mark.slow)])
def test_every_damage_is_detected_and_named(tmp_path: Path, trials: int) -> None:
    faults = {"truncate": "truncated", "flip": "changed", "delete": "missing", "grow": "too long"}
    path = write_example(tmp_path / "model")
    intact = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    for trial in range(trials):
        file, kind = damage(path, random.Random(trial))
        with pytest.raises(CheckpointError) as error:
            check_folder(path)
        if file.name != MANIFEST:
            assert str(file) in str(error.value) and faults[kind] in str(error.value), (trial, kind, str(error.value))
        file.write_bytes(intact[file])
        check_folder(path)


@pytest.mark.parametrize(
    "manifest",
    ["", "{", "[]", "{}", '{"files": []}', '{"files": {"config.json": 3}}', '{"files": {"config.json": {}}}'],
)
def test_an_invalid_manifest_is_refused(tmp_path: Path, manifest: str) -> None:
    path = write_example(tmp_path / "model")
    (path / MANIFEST).write_text(manifest)
    with pytest.raises(CheckpointError, match=MANIFEST):
        check_folder(path)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "inner/../../secret"])
def test_a_manifest_with_paths_outside_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    path = write_example(tmp_path / "model")
    (tmp_path / "secret").write_text("x")
    (path / MANIFEST).write_text(json.dumps({"files": {name: {"bytes": 1, "sha256": "0"}}}))
    with pytest.raises(CheckpointError, match="not a valid manifest"):
        check_folder(path)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="missing"):
        check_folder(tmp_path / "nothing")
