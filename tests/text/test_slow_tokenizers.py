"""Folders without `tokenizer.json`: the same ids and strings as in the tokenizer classes of `transformers`."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from regard.text.tokenizer import Tokenizer
from tests.text.folders import KINDS, write
from tests.text.sample_texts import EDGE_CASES, MIXED
from tests.text.test_tokenizer_folder import assert_same

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("bert", "BertTokenizer", {}),
    "bert, cased": ("bert, cased", "BertTokenizer", {"do_lower_case": False, "tokenize_chinese_chars": False}),
    "bert, accents kept": ("bert", "BertTokenizer", {"strip_accents": False, "clean_up_tokenization_spaces": True}),
    "gpt2": ("gpt2", "GPT2Tokenizer", {}),
    "gpt2 with bos, as OPT": ("gpt2", "GPT2Tokenizer", {"add_bos_token": True, "pad_token": "<|endoftext|>"}),
    "gpt2 with bos, eos and prefix space": ("gpt2", "GPT2Tokenizer",
                                {"add_bos_token": True, "add_eos_token": True, "add_prefix_space": True}),
    "roberta": ("roberta", "RobertaTokenizer", {}),
    "roberta with prefix space": ("roberta", "RobertaTokenizer", {"add_prefix_space": True}),
    "qwen2": ("qwen2", "Qwen2Tokenizer", {"eos_token": "<|im_end|>"}),
}  # fmt: skip


def write_slow(kind: str, folder: Path, **files: Any) -> Path:
    """Write only the vocabulary and merges of a tokenizer."""
    core = KINDS[kind][0]()
    write(folder, **files)
    vocab = core.get_vocab(with_added_tokens=True)
    if kind.startswith("bert"):
        (folder / "vocab.txt").write_text("\n".join(sorted(vocab, key=vocab.__getitem__)) + "\n", encoding="utf-8")
    else:
        core.model.save(str(folder))
        (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    return folder


@pytest.mark.parametrize("case", CASES)
def test_ids_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    kind, cls, config = CASES[case]
    write_slow(kind, tmp_path, tokenizer_config=config | {"tokenizer_class": cls})
    ours, theirs = Tokenizer.load(tmp_path), getattr(transformers, cls).from_pretrained(tmp_path)
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert_same(ours, theirs, MIXED + EDGE_CASES)
    expected = theirs("first text", "the second", return_token_type_ids=True)
    assert ours.encode_with_special_tokens("first text", "the second") == expected["input_ids"]
    assert ours.token_type_ids("first text", "the second") == expected["token_type_ids"]


@pytest.mark.parametrize(("kind", "model_type"), [("bert", "electra"), ("gpt2", "gptj"), ("roberta", "longformer")])
def test_the_model_type_selects_the_class_if_none_is_named(kind: str, model_type: str, tmp_path: Path) -> None:
    write_slow(kind, tmp_path, config={"model_type": model_type})
    theirs = getattr(transformers, CASES[kind][1]).from_pretrained(tmp_path)
    assert_same(Tokenizer.load(tmp_path), theirs, MIXED)


def test_an_unknown_class_is_refused(tmp_path: Path) -> None:
    write_slow("bert", tmp_path, config={"model_type": "roformer"})
    with pytest.raises(ValueError, match="vocab.txt needs the rules of 'roformer', which are not supported"):
        Tokenizer.load(tmp_path)
    with pytest.raises(ValueError, match="the rules of 'T5Tokenizer', which are not supported"):
        Tokenizer.load(write(tmp_path, tokenizer_config={"tokenizer_class": "T5Tokenizer"}))
    with pytest.raises(ValueError, match="the rules of None"):
        Tokenizer.load(write(tmp_path, tokenizer_config={}, config={}))


@pytest.mark.parametrize(
    ("kind", "name", "content", "message"),
    [
        ("bert", "vocab.txt", "a\nb\n", r"'\[SEP\]', which is not among the 2 pieces"),
        ("gpt2", "vocab.json", None, "vocab.json is missing"),
        ("gpt2", "vocab.json", "{}", "do not match"),
        ("gpt2", "merges.txt", "a b c\n", "do not match"),
        ("roberta", "vocab.json", '{"a": 0}', "do not match"),
    ],
)
def test_a_damaged_file_is_refused(kind: str, name: str, content: str | None, message: str, tmp_path: Path) -> None:
    write_slow(kind, tmp_path, config={"model_type": kind})
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        Tokenizer.load(tmp_path)
