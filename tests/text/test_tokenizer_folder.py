"""Tokenizers of Hugging Face folders: ids and strings equal those of `transformers` for the same files."""

import time
from pathlib import Path

import pytest
import transformers

from regard.text.tokenizer import Tokenizer
from tests.text.folders import KINDS, write_kind
from tests.text.sample_texts import EDGE_CASES, LONG, MIXED

Pair = tuple[Tokenizer, transformers.PreTrainedTokenizerFast]


def load_both(folder: Path) -> Pair:
    return Tokenizer.load(folder), transformers.PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return load_both(write_kind(request.param, tmp_path_factory.mktemp("kind")))


def assert_same(ours: Tokenizer, theirs: transformers.PreTrainedTokenizerFast, texts: list[str]) -> None:
    for text in texts:
        parsed = ours.encode(text, special=True)
        assert parsed == theirs.encode(text, add_special_tokens=False), text
        processed = theirs(text, split_special_tokens=True)["input_ids"]
        assert ours.encode_with_special_tokens(text) == processed, text
        for ids in (parsed, processed):
            assert ours.decode(ids, special=True) == theirs.decode(ids), text
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text


def test_ids_and_strings_equal_those_of_transformers(pair: Pair) -> None:
    assert_same(*pair, MIXED + EDGE_CASES)


def test_pairs_equal_those_of_transformers(pair: Pair) -> None:
    ours, theirs = pair
    for first, second in zip(EDGE_CASES[1:], reversed(MIXED), strict=False):
        expected = theirs(first, second, split_special_tokens=True, return_token_type_ids=True)
        assert ours.encode_with_special_tokens(first, second) == expected["input_ids"]
        assert ours.token_type_ids(first, second) == expected["token_type_ids"]


@pytest.mark.parametrize("texts", [LONG[:1], pytest.param(LONG[1:], marks=pytest.mark.slow)], ids=["one", "others"])
def test_very_long_words_are_encoded_quickly(texts: list[str], pair: Pair) -> None:
    ours, theirs = pair
    for text in texts:
        start = time.process_time()
        ids = ours.encode(text)
        assert time.process_time() - start < 2
        assert ids == theirs.encode(text, add_special_tokens=False)


def test_special_tokens_equal_those_of_transformers(pair: Pair) -> None:
    ours, theirs = pair
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert (ours.bos, ours.eos, ours.pad) == (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id)
    assert ours.vocab_size == len(theirs)


def test_an_unpaired_surrogate_is_refused(pair: Pair) -> None:
    with pytest.raises(ValueError, match=r"has '\\ud83d' at index 1, an unpaired surrogate"):
        pair[0].encode("a\ud83d b")


def test_a_special_token_in_user_text_is_encoded_as_characters(pair: Pair) -> None:
    ours, _ = pair
    for token in ours.all_special_tokens:
        ids = ours.encode(f"say {token} now")
        assert token == ours.special_tokens_map.get("unk_token") or ours.core.token_to_id(token) not in ids


def test_a_saved_tokenizer_is_unchanged(pair: Pair, tmp_path: Path) -> None:
    ours, theirs = pair
    ours.save(tmp_path)
    reloaded = Tokenizer.load(tmp_path)
    assert_same(reloaded, theirs, MIXED + EDGE_CASES)
    assert reloaded.special_tokens_map == ours.special_tokens_map
    assert reloaded.clean_up_tokenization_spaces == ours.clean_up_tokenization_spaces
