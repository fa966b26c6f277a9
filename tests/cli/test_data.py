"""`regard data`: tokenizers from files, and prepared data that trains like the data itself."""

import json
from pathlib import Path

import pytest

from regard.checkpoint.atomic_folder import check_folder
from regard.cli import app
from regard.text.tokenizer import Tokenizer
from tests.cli.conftest import regard

TEXT = "The miller went to the mill, and the mill went round. " * 40


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "ÄÖ"}], "id": "zq", "n": 3}) + "\n"
    )
    return tmp_path


def test_a_tokenizer_is_trained_on_all_files_and_saved(corpus: Path) -> None:
    out = corpus / "tokenizer"
    result = regard("data", "tokenizer", corpus / "a.txt", corpus / "b.jsonl", "--size", 290, "--out", out)
    assert result.exit_code == 0, result.output
    assert "290 tokens (bpe)" in result.output and "bytes per token" in result.output and "| mill" in result.output
    check_folder(out)
    assert Tokenizer.load(out).decode(Tokenizer.load(out).encode(TEXT)) == TEXT


@pytest.mark.parametrize(("kind", "size"), [("byte", 261), ("character", 5 + len(set(TEXT + "ÄÖzq")))])
def test_byte_and_character_tokenizers(kind: str, size: int, corpus: Path) -> None:
    arguments = ("data", "tokenizer", corpus / "a.txt", corpus / "b.jsonl", "--kind", kind, "--json")
    result = json.loads(regard(*arguments, "--out", corpus / "tokenizer").stdout)
    assert result["vocabulary"] == Tokenizer.load(corpus / "tokenizer").vocab_size == size
    assert 0.9 < result["bytes_per_token"] < 1.1


def test_fields_select_strings(corpus: Path) -> None:
    arguments = ("data", "tokenizer", corpus / "b.jsonl", "--kind", "character", "--out")
    regard(*arguments, corpus / "all")
    regard(*arguments, corpus / "some", "--field", "id")
    assert Tokenizer.load(corpus / "all").vocab_size == 5 + 4
    assert Tokenizer.load(corpus / "some").vocab_size == 5 + 2
    wrong = regard(*arguments, corpus / "none", "--field", "message")
    assert isinstance(wrong.exception, ValueError) and "did you mean 'messages'" in str(wrong.exception)


def test_wrong_arguments_of_tokenizer_are_refused(corpus: Path) -> None:
    out = corpus / "tokenizer"
    assert regard("data", "tokenizer", corpus / "a.txt", "--kind", "byte", "--size", 300, "--out", out).exit_code == 2
    small = regard("data", "tokenizer", corpus / "a.txt", "--size", 100, "--out", out)
    assert isinstance(small.exception, ValueError) and "at least 261" in str(small.exception)
    missing = regard("data", "tokenizer", corpus / "b.txt", "--out", out)
    assert isinstance(missing.exception, FileNotFoundError) and not out.exists()
    existing = regard("data", "tokenizer", corpus / "a.txt", "--out", corpus)
    assert isinstance(existing.exception, ValueError) and "exists" in str(existing.exception)


def losses(run: Path) -> list[float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]


def test_training_on_prepared_data_has_the_same_losses(corpus: Path) -> None:
    small = ("--model.width=24", "--data.rows=2", "--data.length=32", "--data.held_out=1", "--train.steps=3")
    arguments = ("llama", "--data", corpus / "a.txt", *small, "--tokenizer.size=280")
    plain = regard("train", *arguments, "--out", corpus / "plain")
    assert plain.exit_code == 0, plain.output
    result = regard("data", "prepare", *arguments, "--processes", 1, "--out", corpus / "prepared")
    assert result.exit_code == 0 and "tokens/s" in result.output and "regard train" in result.output, result.output
    again = regard("data", "prepare", *arguments, "--processes", 1, "--out", corpus / "prepared")
    assert "everything was prepared already" in again.output
    shown = regard("data", "show", corpus / "prepared" / "recipe.toml", "--rows", 1)
    assert shown.exit_code == 0 and "mill" in shown.output, shown.output
    prepared = regard("train", corpus / "prepared" / "recipe.toml", "--out", corpus / "run")
    assert prepared.exit_code == 0, prepared.output
    assert losses(corpus / "run") == losses(corpus / "plain")


def test_flags_of_data_are_frozen() -> None:
    from typer.main import get_command

    commands = get_command(app).commands  # ty: ignore
    flags = {name: {o for p in c.params for o in p.opts if o.startswith("--")} for name, c in commands.items()}
    assert flags["data tokenizer"] >= {"--out", "--kind", "--size", "--format", "--field", "--json"}
    assert flags["data show"] >= {"--from", "--data", "--rows", "--split"}
    assert flags["data prepare"] >= {"--out", "--processes", "--examples", "--from", "--data"}


def test_data_without_a_task_lists_the_tasks() -> None:
    assert "regard data prepare llama" in regard("data").output
