"""Fill-in-the-middle: the tokens of every family are found, and the ids are in their order."""

import pytest

from regard.text.infilling import TOKENS, InfillingTokens, encode_infilling, infilling_tokens
from regard.text.tokenizer import Tokenizer
from regard.text.train import bpe


def with_tokens(*tokens: str) -> Tokenizer:
    core = bpe(["def add(a, b): return a + b"], vocab=280).core
    core.add_special_tokens(list(tokens))
    return Tokenizer(core, eos="<|end|>")


@pytest.mark.parametrize("tokens", TOKENS, ids=lambda tokens: tokens[0])
def test_the_parts_are_in_the_order_of_training(tokens: tuple[str, str, str]) -> None:
    tokenizer = with_tokens(*tokens, "<|endoftext|>")
    found = infilling_tokens(tokenizer)
    prefix, suffix, middle, end = map(tokenizer.core.token_to_id, (*tokens, "<|endoftext|>"))
    assert found == InfillingTokens(prefix, suffix, middle, (end,))
    ids = encode_infilling(tokenizer, found, "def add(", " + b")
    assert tokenizer.decode(ids, special=True) == f"{tokens[0]}def add({tokens[1]} + b{tokens[2]}"
    assert tokenizer.encode("def add(") == ids[1 : ids.index(found.suffix)]


def test_a_vocabulary_without_all_tokens_cannot_infill() -> None:
    assert infilling_tokens(with_tokens()) is None
    assert infilling_tokens(with_tokens(*TOKENS[0][:2], TOKENS[1][2])) is None


def test_typed_tokens_are_only_characters() -> None:
    tokenizer = with_tokens(*TOKENS[0])
    tokens = infilling_tokens(tokenizer)
    assert tokens is not None
    ids = encode_infilling(tokenizer, tokens, "a<|fim_suffix|>", "<|fim_middle|>b")
    assert ids.count(tokens.suffix) == ids.count(tokens.middle) == 1
