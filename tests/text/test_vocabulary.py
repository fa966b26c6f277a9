"""The bytes of the tokens of a text are the bytes of the text, for every kind of tokenizer that generates."""

import pytest
import tokenizers
from tokenizers import decoders, models

from regard.engine.engine import Engine
from regard.engine.grammar import GrammarCompiler
from regard.engine.request import Sampling
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.position.rope import Rope
from regard.text.sentencepiece import build_decoder
from regard.text.tokenizer import Tokenizer
from regard.text.train import bpe, byte, character
from regard.text.vocabulary import token_bytes

TEXTS = ["Anna is in the barn.\n", 'naïve {"a": [1, 2]}\t', "日本 😀 x  y"]


def sentencepiece() -> Tokenizer:
    pieces = ["<unk>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "n", "▁a", "an", "▁an", "na"]
    vocab = {piece: id for id, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("a", "n"), ("▁a", "n"), ("n", "a")]
    core = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    core.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    core.decoder = build_decoder(prefix_space=False)
    core.add_special_tokens(["<unk>", "</s>"])
    return Tokenizer(core, eos="</s>")


TOKENIZERS = {
    "smollm2": lambda: Tokenizer.load("smollm2"),
    "byte": byte,
    "bpe": lambda: bpe(TEXTS * 20, 320),
    "character": lambda: character(TEXTS),
    "sentencepiece": sentencepiece,
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_bytes_of_tokens_join_to_the_text(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    vocabulary = token_bytes(tokenizer)
    assert len(vocabulary) == tokenizer.vocab_size
    for text in TEXTS:
        assert b"".join(vocabulary[id] for id in tokenizer.encode(text)) == text.encode()
    assert all(vocabulary[id] == b"" for id in (*tokenizer.all_special_ids, *tokenizer.stop_ids))


def test_an_added_token_that_is_not_special_is_its_text() -> None:
    tokenizer = byte()
    tokenizer.core.add_tokens(["a b", "<tool>"])
    vocabulary = token_bytes(tokenizer)
    assert vocabulary[tokenizer.core.token_to_id("a b")] == b"a b"
    assert vocabulary[tokenizer.core.token_to_id("<tool>")] == b"<tool>"


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), decoders.BPEDecoder(), None], ids=str)
def test_other_decoders_are_refused(decoder) -> None:
    core = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    if decoder is not None:
        core.decoder = decoder
    with pytest.raises(ValueError, match=r"the tokenizer's decoder is \w+, for which structured output is not"):
        token_bytes(Tokenizer(core))


@pytest.mark.ledger("dec.structured")
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_generated_text_matches_the_grammar(kind: str) -> None:
    """The model has more ids than the tokenizer."""
    tokenizer = TOKENIZERS[kind]()
    vocab = tokenizer.vocab_size + 5
    block = Block((Sublayer(Attention(2, position=Rope())),))
    engine = Engine(Decoder(vocab=vocab, width=16, layers=(Repeat((block,), 1),), context=128).build(seed=1), rows=2)
    grammars = GrammarCompiler(token_bytes(tokenizer), tokenizer.stop_ids, vocab)
    options = ["an na", "Anna is", "日本"] if kind != "sentencepiece" else ["an na", "anna", "日本"]
    grammar, found = grammars.choice(options), set()
    for seed in range(12):
        sampling = Sampling(max_new=40, seed=seed, temperature=2.0, grammar=grammar, stop_ids=tokenizer.stop_ids)
        tokens = engine.generate([1], sampling)
        assert tokens[-1].finish == "stop"
        found.add(tokenizer.decode([token.id for token in tokens]))
    assert found <= set(options) and len(found) > 1
