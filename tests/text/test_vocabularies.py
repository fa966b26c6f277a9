"""Folders of older kinds, with a bare vocabulary: the ids and texts of the class that `transformers` has for them."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from regard.text.tokenizer import Tokenizer
from tests.text.folders import KINDS, write
from tests.text.mixed import MIXED, MORE
from tests.text.test_folders import same

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("bert", "BertTokenizer", {}),
    "bert, cased": ("bert, cased", "BertTokenizer", {"do_lower_case": False, "tokenize_chinese_chars": False}),
    "bert, accents kept": ("bert", "BertTokenizer", {"strip_accents": False, "clean_up_tokenization_spaces": True}),
    "gpt2": ("gpt2", "GPT2Tokenizer", {}),
    "gpt2 as OPT has it": ("gpt2", "GPT2Tokenizer", {"add_bos_token": True, "pad_token": "<|endoftext|>"}),
    "gpt2, framed and spaced": ("gpt2", "GPT2Tokenizer",
                                {"add_bos_token": True, "add_eos_token": True, "add_prefix_space": True}),
    "roberta": ("roberta", "RobertaTokenizer", {}),
    "roberta, spaced": ("roberta", "RobertaTokenizer", {"add_prefix_space": True}),
    "qwen2": ("qwen2", "Qwen2Tokenizer", {"eos_token": "<|im_end|>"}),
}  # fmt: skip


def bare(kind: str, folder: Path, **files: Any) -> Path:
    """Only the pieces and merges of a tokenizer, as its class used to be saved."""
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
def test_bare_vocabularies(case: str, tmp_path: Path) -> None:
    kind, named, config = CASES[case]
    bare(kind, tmp_path, tokenizer_config=config | {"tokenizer_class": named})
    ours, theirs = Tokenizer.load(tmp_path), getattr(transformers, named).from_pretrained(tmp_path)
    assert ours.names == theirs.special_tokens_map
    same(ours, theirs, MIXED + MORE)
    expected = theirs("first text", "the second", return_token_type_ids=True)
    assert ours.framed("first text", "the second") == expected["input_ids"]
    assert ours.sides("first text", "the second") == expected["token_type_ids"]


@pytest.mark.parametrize(("kind", "model"), [("bert", "electra"), ("gpt2", "gptj"), ("roberta", "longformer")])
def test_the_model_says_where_the_tokenizer_does_not(kind: str, model: str, tmp_path: Path) -> None:
    bare(kind, tmp_path, config={"model_type": model})
    theirs = getattr(transformers, CASES[kind][1]).from_pretrained(tmp_path)
    same(Tokenizer.load(tmp_path), theirs, MIXED)


def test_what_is_not_known_is_refused_by_name(tmp_path: Path) -> None:
    bare("bert", tmp_path, config={"model_type": "roformer"})
    with pytest.raises(ValueError, match="vocab.txt is a bare vocabulary, and the rules of 'roformer' are not known"):
        Tokenizer.load(tmp_path)
    with pytest.raises(ValueError, match="the rules of 'T5Tokenizer' are not known"):
        Tokenizer.load(write(tmp_path, tokenizer_config={"tokenizer_class": "T5Tokenizer"}))
    with pytest.raises(ValueError, match="the rules of None"):
        Tokenizer.load(write(tmp_path, tokenizer_config={}, config={}))


@pytest.mark.parametrize(
    ("kind", "name", "content", "words"),
    [
        ("bert", "vocab.txt", "a\nb\n", r"'\[SEP\]' frames every text, but is not among its 2 pieces"),
        ("gpt2", "vocab.json", None, "vocab.json is missing"),
        ("gpt2", "vocab.json", "{}", "do not fit together"),
        ("gpt2", "merges.txt", "a b c\n", "do not fit together"),
        ("roberta", "vocab.json", '{"a": 0}', "do not fit together"),
    ],
)
def test_damage_is_named(kind: str, name: str, content: str | None, words: str, tmp_path: Path) -> None:
    bare(kind, tmp_path, config={"model_type": kind})
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        Tokenizer.load(tmp_path)
