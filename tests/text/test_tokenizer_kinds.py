"""The kinds of tokenizers: words, characters, byte-pair encoding and WordPiece, and what each of them cannot say."""

import json
import re
from collections import Counter
from itertools import pairwise

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from regard.text.tokenizer import Tokenizer
from regard.text.train import MARKERS, bpe, character

PROSE = ["Tom went to the kitchen. Mary took the ball.", "Where is Tom? In the kitchen, naïve 🙂."] * 20
UNKNOWN = "[UNK]"


def trained(model, trainer, split, vocab: int = 90, texts=PROSE) -> Tokenizer:
    core = tokenizers.Tokenizer(model(unk_token=UNKNOWN))
    core.pre_tokenizer = split
    core.train_from_iterator(texts, trainer(vocab_size=vocab, special_tokens=[UNKNOWN], show_progress=False))
    return Tokenizer(core)


def words(texts, split=None) -> Tokenizer:
    return trained(models.WordLevel, trainers.WordLevelTrainer, split or pre_tokenizers.Whitespace(), 1000, texts)


def unknowns(tokenizer: Tokenizer, text: str) -> int:
    return tokenizer.encode(text).count(0)


@pytest.mark.ledger("tok.word")
def test_words_need_a_large_vocabulary_and_characters_long_sequences(tmp_path) -> None:
    word, letter, text = words(PROSE), character(PROSE), "Mary went to the kitchen."
    word.save(tmp_path)
    word = Tokenizer.load(tmp_path)
    assert (len(word.encode(text)), len(letter.encode(text))) == (6, 25)
    assert unknowns(word, text) == 0
    assert unknowns(word, "Susan went to the cellar.") == 2
    assert letter.decode(letter.encode(PROSE[1])) == PROSE[1]
    more = PROSE + [f"name{n}" for n in range(500)]
    assert words(more).vocab_size == word.vocab_size + 500
    assert character(more).vocab_size == letter.vocab_size + 10  # the digits; every letter was there


@pytest.mark.ledger("tok.example")
def test_what_is_counted_depends_on_the_rule() -> None:
    text = "Transformers are powerful!"
    by_spaces, with_punctuation = words([text], pre_tokenizers.WhitespaceSplit()), words([text])
    assert len(by_spaces.encode(text)) == 3
    assert len(with_punctuation.encode(text)) == 4
    letters = character([text])
    assert len(letters.encode(text)) == 26
    assert letters.decode(letters.encode(text)) == text
    assert len(letters.encode(text.replace(" ", ""))) == 24  # and the spaces are gone


def longest_matches(word: str, vocabulary: set[str]) -> list[str]:
    """WordPiece's rule: of the pieces that begin the rest of the word the longest; inside a word they begin with ##."""
    pieces, start = [], 0
    while start < len(word):
        rest = [("##" if start else "") + word[start:end] for end in range(len(word), start, -1)]
        found = next((piece for piece in rest if piece in vocabulary), None)
        if found is None:
            return [UNKNOWN]
        pieces.append(found)
        start += len(found.removeprefix("##"))
    return pieces


@pytest.mark.ledger("tok.wordpiece")
def test_wordpiece_takes_the_longest_piece_that_fits(tmp_path) -> None:
    trained(models.WordPiece, trainers.WordPieceTrainer, pre_tokenizers.Whitespace()).save(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    vocabulary = set(tokenizer.core.get_vocab())
    assert any(piece.startswith("##") and len(piece) > 3 for piece in vocabulary)
    for text in [*PROSE[:2], "Tom took the kitten", "tottering", "Жaw Tom", "a🙂t"]:
        expected = [piece for word in re.findall(r"\w+|[^\w\s]+", text) for piece in longest_matches(word, vocabulary)]
        assert [tokenizer.core.id_to_token(id) for id in tokenizer.encode(text)] == expected


@pytest.mark.ledger("tok.bpe")
def test_bpe_joins_the_most_frequent_neighbours() -> None:
    """Every join is, when it is learned, that of the most frequent neighbours; encoding repeats the joins in order."""
    text = " low" * 50 + " lower" * 20 + " newest" * 60 + " widest" * 30
    tokenizer = bpe([text], vocab=256 + len(MARKERS) + 12)
    merges = [tuple(pair) for pair in json.loads(tokenizer.core.to_str())["model"]["merges"]]
    parts = [list(word.replace(" ", "Ġ")) for word in re.findall(" [a-z]+", text)]  # Ġ: a space, in this alphabet
    rare = list("Ġslowest")
    for merge in merges:
        pairs = Counter(pair for word in parts for pair in pairwise(word))
        assert pairs[merge] == max(pairs.values())
        for word in [*parts, rare]:
            while merge in (neighbours := list(pairwise(word))):
                first = neighbours.index(merge)
                word[first : first + 2] = ["".join(merge)]
    assert len(merges) == 12
    assert [tokenizer.token(id) for id in tokenizer.encode(" newest")] == [" newest"]  # a frequent word is whole …
    assert len(rare) > 1  # … and a rare one in pieces
    assert [tokenizer.token(id) for id in tokenizer.encode(" slowest")] == [part.replace("Ġ", " ") for part in rare]


@pytest.mark.ledger("tok.total")
def test_subwords_over_characters_do_not_know_every_text() -> None:
    for model, trainer in [(models.WordPiece, trainers.WordPieceTrainer), (models.BPE, trainers.BpeTrainer)]:
        tokenizer = trained(model, trainer, pre_tokenizers.Whitespace())
        assert unknowns(tokenizer, "Tom took the ball") == 0
        assert unknowns(tokenizer, "Tom took the Ж") == 1
    bytewise = bpe(PROSE, vocab=320)
    assert bytewise.decode(bytewise.encode("Tom took the Ж")) == "Tom took the Ж"
