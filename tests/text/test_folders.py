"""Any folder's tokenizer gives the ids and texts that `transformers` gives from the same files."""

import time
from pathlib import Path

import pytest
import transformers

from regard.text.tokenizer import Tokenizer
from tests.text.folders import KINDS, make
from tests.text.mixed import LONG, MIXED, MORE

Pair = tuple[Tokenizer, transformers.PreTrainedTokenizerFast]
FLAGS = ("lstrip", "rstrip", "normalized", "single_word")


def both(folder: Path) -> Pair:
    return Tokenizer.load(folder), transformers.PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return both(make(request.param, tmp_path_factory.mktemp("kind")))


def same(ours: Tokenizer, theirs: transformers.PreTrainedTokenizerFast, texts: list[str]) -> None:
    for text in texts:
        marked = ours.encode(text, special=True)
        assert marked == theirs.encode(text, add_special_tokens=False), text
        framed = theirs(text, split_special_tokens=True)
        assert ours.framed(text) == framed["input_ids"], text
        for ids in (marked, framed["input_ids"]):
            assert ours.decode(ids, special=True) == theirs.decode(ids), text
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text


def test_texts_of_all_kinds(pair: Pair) -> None:
    same(*pair, MIXED + MORE)


def test_two_texts_and_their_sides(pair: Pair) -> None:
    ours, theirs = pair
    for first, second in zip(MORE[1:], reversed(MIXED), strict=False):
        expected = theirs(first, second, split_special_tokens=True, return_token_type_ids=True)
        assert ours.framed(first, second) == expected["input_ids"]
        assert ours.sides(first, second) == expected["token_type_ids"]


@pytest.mark.parametrize("texts", [LONG[:1], pytest.param(LONG[1:], marks=pytest.mark.slow)], ids=["one", "others"])
def test_very_long_words_are_quick(texts: list[str], pair: Pair) -> None:
    ours, theirs = pair
    for text in texts:
        start = time.perf_counter()
        ids = ours.encode(text)
        assert time.perf_counter() - start < 2
        assert ids == theirs.encode(text, add_special_tokens=False)


def test_markers_and_their_names(pair: Pair) -> None:
    ours, theirs = pair
    assert ours.names == theirs.special_tokens_map
    assert (ours.bos, ours.eos, ours.pad) == (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id)
    assert ours.vocab_size == len(theirs)


def test_half_a_surrogate_pair_is_refused(pair: Pair) -> None:
    with pytest.raises(ValueError, match=r"holds '\\ud83d' at 1: half of a surrogate pair"):
        pair[0].encode("a\ud83d b")


def test_a_typed_marker_is_only_characters(pair: Pair) -> None:
    ours, _ = pair
    for marker in ours.markers:
        ids = ours.encode(f"say {marker} now")
        assert marker == ours.names.get("unk_token") or ours.core.token_to_id(marker) not in ids


def test_saved_again_it_is_the_same(pair: Pair, tmp_path: Path) -> None:
    ours, theirs = pair
    ours.save(tmp_path)
    same(Tokenizer.load(tmp_path), theirs, MIXED + MORE)
    assert (Tokenizer.load(tmp_path).names, Tokenizer.load(tmp_path).tidy) == (ours.names, ours.tidy)
