"""`regard data`: tokenizers from files."""

import json
from pathlib import Path

import pytest

from regard.checkpoint.atomic_folder import check_folder
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
    result = regard("data", "tokenizer", corpus / "a.txt", corpus / "b.jsonl", "--size", 300, "--out", out)
    assert result.exit_code == 0, result.output
    assert "300 tokens (bpe)" in result.output and "bytes per token" in result.output and "'| mill" in result.output
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
