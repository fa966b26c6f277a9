"""Words and sentences of tokens are those of the text, for every kind of tokenizer."""

import pytest

from regard.text.borders import encode_sentences, encode_words, split_sentences
from regard.text.tokenizer import Tokenizer
from regard.text.train import bpe, byte, character
from tests.text import folders

TEXT = "The cat's owner, Zoë, paid 30 dollars. Then she left!  Supercalifragilistic cats\nsat on 3.14 mats."
WORDS = ["The", "cat", "'", "s", "owner", ",", "Zoë", ",", "paid", "30", "dollars", ".", "Then", "she", "left", "!"]
WORDS += ["Supercalifragilistic", "cats", "sat", "on", "3", ".", "14", "mats", "."]
SENTENCES = [
    "The cat's owner, Zoë, paid 30 dollars.", "Then she left!", "Supercalifragilistic cats", "sat on 3.14 mats.",
]  # fmt: skip
TOKENIZERS = {
    "byte": byte,
    "bpe": lambda: bpe([TEXT] * 4, 300),
    "character": lambda: character([TEXT]),
    "gpt2": lambda: Tokenizer(folders.gpt2()),
    "roberta": lambda: Tokenizer(folders.roberta()),
    "llama2": lambda: Tokenizer(folders.llama2()),
    "t5": lambda: Tokenizer(folders.t5()),
    "bert": lambda: Tokenizer(folders.bert()),
}


def runs_of(tokenizer: Tokenizer, ids: list[int], numbers: list[int]) -> list[str]:
    runs: dict[int, list[int]] = {}
    for id, number in zip(ids, numbers, strict=True):
        runs.setdefault(number, []).append(id)
    return [tokenizer.decode(run).strip().replace("##", "") for run in runs.values()]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_words_are_those_of_the_text(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    ids, words = encode_words(tokenizer, TEXT)
    assert ids.tolist() == tokenizer.encode(TEXT)
    assert (words[1:] >= words[:-1]).all() and words[0] == 1
    if name in ("gpt2", "bpe", "roberta", "llama2"):  # a token may hold several words: it belongs to the first
        assert len(set(words.tolist())) > 18
    else:
        assert len(set(words.tolist())) == len(WORDS)
    if name in ("byte", "character"):
        assert runs_of(tokenizer, ids.tolist(), words.tolist()) == WORDS


@pytest.mark.parametrize("name", TOKENIZERS)
def test_sentences_are_those_of_the_text(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    ids, sentences = encode_sentences(tokenizer, TEXT)
    assert ids.tolist() == tokenizer.encode(TEXT)
    assert sorted(set(sentences.tolist())) == [1, 2, 3, 4]
    if name in ("byte", "character", "bpe", "gpt2"):
        assert runs_of(tokenizer, ids.tolist(), sentences.tolist()) == SENTENCES
    assert split_sentences(TEXT) == SENTENCES


def test_a_special_token_in_a_text_is_one_run_of_characters() -> None:
    tokenizer = byte(("[MASK]",))
    ids, words = encode_words(tokenizer, "a [MASK] b")
    assert ids.tolist() == tokenizer.encode("a [MASK] b")
    assert tokenizer.core.token_to_id("[MASK]") not in ids
    assert len(set(words.tolist())) == 5
    assert encode_words(tokenizer, "")[0].tolist() == []
