"""Word, character, BPE and WordPiece tokenization: their rules, and the strings that each cannot represent."""

import json
import re
from collections import Counter
from itertools import pairwise

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from regard.text.tokenizer import Tokenizer
from regard.text.train import SPECIAL_TOKENS, bpe, character

PROSE = ["Tom went to the kitchen. Mary took the ball.", "Where is Tom? In the kitchen, naïve 🙂."] * 20
UNKNOWN = "[UNK]"


def train(model, trainer, pre_tokenizer, vocab: int = 90, texts=PROSE) -> Tokenizer:
    core = tokenizers.Tokenizer(model(unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizer
    core.train_from_iterator(texts, trainer(vocab_size=vocab, special_tokens=[UNKNOWN], show_progress=False))
    return Tokenizer(core)


def word_level(texts, pre_tokenizer=None) -> Tokenizer:
    return train(models.WordLevel, trainers.WordLevelTrainer, pre_tokenizer or pre_tokenizers.Whitespace(), 1000, texts)


def count_unknown(tokenizer: Tokenizer, text: str) -> int:
    return tokenizer.encode(text).count(0)


@pytest.mark.ledger("tok.word")
def test_words_need_a_large_vocabulary_and_characters_long_sequences(tmp_path) -> None:
    words, characters, text = word_level(PROSE), character(PROSE), "Mary went to the kitchen."
    words.save(tmp_path)
    words = Tokenizer.load(tmp_path)
    assert (len(words.encode(text)), len(characters.encode(text))) == (6, 25)
    assert count_unknown(words, text) == 0
    assert count_unknown(words, "Susan went to the cellar.") == 2
    assert characters.decode(characters.encode(PROSE[1])) == PROSE[1]
    more_texts = PROSE + [f"name{n}" for n in range(500)]
    assert word_level(more_texts).vocab_size == words.vocab_size + 500
    assert character(more_texts).vocab_size == characters.vocab_size + 10  # the digits; the letters are known


@pytest.mark.ledger("tok.example")
def test_the_number_of_words_depends_on_the_pre_tokenizer() -> None:
    text = "Transformers are powerful!"
    by_spaces, with_punctuation = word_level([text], pre_tokenizers.WhitespaceSplit()), word_level([text])
    assert len(by_spaces.encode(text)) == 3
    assert len(with_punctuation.encode(text)) == 4
    characters = character([text])
    assert len(characters.encode(text)) == 26
    assert characters.decode(characters.encode(text)) == text
    assert len(characters.encode(text.replace(" ", ""))) == 24  # without the spaces


def longest_matches(word: str, vocabulary: set[str]) -> list[str]:
    """WordPiece's rule: repeatedly take the longest piece that is a prefix of the rest; inside a word it has ##."""
    pieces, start = [], 0
    while start < len(word):
        candidates = [("##" if start else "") + word[start:end] for end in range(len(word), start, -1)]
        found = next((piece for piece in candidates if piece in vocabulary), None)
        if found is None:
            return [UNKNOWN]
        pieces.append(found)
        start += len(found.removeprefix("##"))
    return pieces


@pytest.mark.ledger("tok.wordpiece")
def test_wordpiece_takes_the_longest_matching_piece(tmp_path) -> None:
    train(models.WordPiece, trainers.WordPieceTrainer, pre_tokenizers.Whitespace()).save(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    vocabulary = set(tokenizer.core.get_vocab())
    assert any(piece.startswith("##") and len(piece) > 3 for piece in vocabulary)
    for text in [*PROSE[:2], "Tom took the kitten", "tottering", "Жaw Tom", "a🙂t"]:
        expected = [piece for word in re.findall(r"\w+|[^\w\s]+", text) for piece in longest_matches(word, vocabulary)]
        assert [tokenizer.core.id_to_token(id) for id in tokenizer.encode(text)] == expected


@pytest.mark.ledger("tok.bpe")
def test_bpe_merges_the_most_frequent_pair() -> None:
    """Each merge is of the most frequent adjacent pair at that point; encoding applies the merges in order."""
    text = " low" * 50 + " lower" * 20 + " newest" * 60 + " widest" * 30
    tokenizer = bpe([text], vocab=256 + len(SPECIAL_TOKENS) + 12)
    merges = [tuple(pair) for pair in json.loads(tokenizer.core.to_str())["model"]["merges"]]
    # Ġ is the byte-level form of a space
    parts = [list(word.replace(" ", "Ġ")) for word in re.findall(" [a-z]+", text)]
    rare = list("Ġslowest")
    for merge in merges:
        pairs = Counter(pair for word in parts for pair in pairwise(word))
        assert pairs[merge] == max(pairs.values())
        for word in [*parts, rare]:
            while merge in (adjacent := list(pairwise(word))):
                first = adjacent.index(merge)
                word[first : first + 2] = ["".join(merge)]
    assert len(merges) == 12
    frequent, other = (
        [tokenizer.decode_token(id) for id in tokenizer.encode(word)] for word in (" newest", " slowest")
    )
    assert frequent == [" newest"]
    assert other == [part.replace("Ġ", " ") for part in rare] and len(rare) > 1


@pytest.mark.ledger("tok.total")
def test_only_byte_level_subwords_represent_every_string() -> None:
    for model, trainer in [(models.WordPiece, trainers.WordPieceTrainer), (models.BPE, trainers.BpeTrainer)]:
        tokenizer = train(model, trainer, pre_tokenizers.Whitespace())
        assert count_unknown(tokenizer, "Tom took the ball") == 0
        assert count_unknown(tokenizer, "Tom took the Ж") == 1
    byte_level = bpe(PROSE, vocab=320)
    assert byte_level.decode(byte_level.encode("Tom took the Ж")) == "Tom took the Ж"


def test_single_digits_are_tokens_in_every_place() -> None:
    texts = ["347 apples and 347, 3471 or 1347 pears, 47 plums"] * 50
    whole, single = bpe(texts, 330), bpe(texts, 330, single_digits=True)
    for text in ("347", " 347", '"347"', "a1347b 3"):
        tokens = [single.decode_token(id) for id in single.encode(text)]
        assert (
            all(token.isdigit() <= (len(token) == 1) for token in tokens) and single.decode(single.encode(text)) == text
        )
        assert [token for token in tokens if token.isdigit()] == [char for char in text if char.isdigit()]
    assert len(whole.encode(" 347")) < len(single.encode(" 347"))
