"""SentencePiece models against plain-Python references, the SentencePiece library and `transformers`."""

import io
import struct
from math import inf
from pathlib import Path
from typing import Any

import pytest
import transformers

from regard.text.sentencepiece import BPE, BYTE, CONTROL, NORMAL, UNIGRAM, UNKNOWN, USER_DEFINED
from regard.text.tokenizer import Tokenizer
from tests.text.folders import BYTES, TEXTS, write
from tests.text.sample_texts import EDGE_CASES, LONG, MIXED
from tests.text.test_tokenizer_folder import assert_same

SUBWORDS = {"▁": -3.0, "▁t": -4, "▁th": -5, "▁the": -4.5, "he": -4.2, "in": -5.1, "ing": -5.5, "▁a": -4.1, "at": -4.4,
         "cat": -6.5, "▁cat": -7, "ca": -6.1, "▁▁": -6, "日本": -6.2}  # fmt: skip
LETTERS = {char: -8.0 - rank / 100 for rank, char in enumerate("abcdefghijklmnopqrstuvwxyz.,;'!日本")}
SPECIAL = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL}
PIECES = [(text, 0.0, type) for text, type in SPECIAL.items()]
PIECES += [(text, float(score), NORMAL) for text, score in (SUBWORDS | LETTERS).items()]
STRINGS = ["the cat", "  the cating  that,", "thethe 日本日 the", "", "a", "catcatcat! hat"]


def varint(value: int) -> bytes:
    low = value & 127
    return bytes([low]) if value < 128 else bytes([low | 128]) + varint(value >> 7)


def field(key: int, value: Any) -> bytes:
    if isinstance(value, float):
        return varint(key << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return varint(key << 3) + varint(value)
    content = value.encode() if isinstance(value, str) else value
    return varint(key << 3 | 2) + varint(len(content)) + content


def serialize(
    pieces: list[tuple[str, float, int]], model_type: int, byte_fallback: bool = False, keep_spaces: bool = True
) -> bytes:
    """The bytes of a SentencePiece model."""
    content = b"".join(field(1, field(1, text) + field(2, score) + field(3, type)) for text, score, type in pieces)
    unknown = next(id for id, piece in enumerate(pieces) if piece[2] == UNKNOWN)
    trainer = field(3, model_type) + field(35, int(byte_fallback)) + field(40, unknown)
    normalizer = field(4, int(not keep_spaces)) + field(3, 1)
    return content + field(2, trainer) + field(3, normalizer)


def bpe_reference(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's BPE: merge the adjacent pair with the highest score, the leftmost of equal ones."""
    parts = list(text)
    while True:
        pairs = [(-scores.get(a + b, -inf), at) for at, (a, b) in enumerate(zip(parts, parts[1:], strict=False))]
        best, at = min(pairs, default=(inf, 0))
        if best == inf:
            return parts
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def unigram_reference(text: str, scores: dict[str, float]) -> list[str]:
    """The segmentation with the highest sum of scores."""
    best: list[tuple[float, list[str]]] = [(0.0, [])]
    for end in range(1, len(text) + 1):
        starts = [at for at in range(end) if text[at:end] in scores]
        best.append(max((best[at][0] + scores[text[at:end]], [*best[at][1], text[at:end]]) for at in starts))
    return best[-1][1]


@pytest.mark.parametrize(("model_type", "reference"), [(BPE, bpe_reference), (UNIGRAM, unigram_reference)])
def test_pieces_equal_those_of_the_reference(model_type: int, reference: Any, tmp_path: Path) -> None:
    unigram = model_type == UNIGRAM
    (tmp_path / "tokenizer.model").write_bytes(serialize(PIECES, model_type))
    cls = "T5Tokenizer" if unigram else "LlamaTokenizer"
    ours = Tokenizer.load(write(tmp_path, tokenizer_config={"tokenizer_class": cls}))
    for text in STRINGS:
        words = [f"▁{word}" for word in text.split()] if unigram else [with_metaspace(text)]
        expected = [piece for word in words for piece in reference(word, SUBWORDS | LETTERS)]
        assert [ours.core.id_to_token(id) for id in ours.encode(text)] == expected
        assert ours.decode(ours.encode(text)) == (" ".join(text.split()) if unigram else text.removeprefix(" "))


def with_metaspace(text: str) -> str:
    """Spaces as ▁, with one before the first word unless the text has one, as in `transformers`."""
    return text.replace(" ", "▁") if text.startswith(" ") or not text else "▁" + text.replace(" ", "▁")


def test_byte_fallback_and_user_defined_pieces_are_encoded(tmp_path: Path) -> None:
    pieces = [*PIECES, *((text, 0.0, BYTE) for text in BYTES), ("<tool>", 0.0, USER_DEFINED)]
    (tmp_path / "tokenizer.model").write_bytes(serialize(pieces, BPE, byte_fallback=True))
    write(tmp_path, config={"model_type": "llama"}, tokenizer_config={"add_bos_token": True})
    ours = Tokenizer.load(tmp_path)
    assert ours.prefix_ids == (ours.bos,) and (ours.bos, ours.eos) == (1, 2)
    tokens = [ours.core.id_to_token(id) for id in ours.encode("é<tool>a</s>")]
    assert tokens == ["▁", "<0xC3>", "<0xA9>", "<tool>", "a", "<0x3C>", "<0x2F>", "s", "<0x3E>"]
    for text in MIXED + LONG[:2]:
        assert ours.decode(ours.encode(text)) == text.removeprefix(" ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 pieces"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", "an integer has more than ten bytes"),
        (b"\x0a\x40abc", "extends past the end"),
        (b"\x0f", "wire type 7"),
        (serialize(PIECES + PIECES[-1:], BPE), "of them distinct"),
        (serialize(PIECES, 3), "expected byte-pair encoding without a normalizer"),
        (serialize(PIECES, BPE, keep_spaces=False), "expected byte-pair encoding without a normalizer"),
        (serialize([*PIECES, ("ab" * 600, 0.0, NORMAL)], BPE), "a piece has 1200 characters"),
    ],
)
def test_a_damaged_model_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    write(tmp_path, config={"model_type": "llama"})
    with pytest.raises(ValueError, match=message):
        Tokenizer.load(tmp_path)


def test_an_unknown_class_is_refused(tmp_path: Path) -> None:
    (tmp_path / "spiece.model").write_bytes(serialize(PIECES, UNIGRAM))
    with pytest.raises(ValueError, match="the rules of 'PegasusTokenizer', which are not supported"):
        Tokenizer.load(write(tmp_path, tokenizer_config={"tokenizer_class": "PegasusTokenizer"}))


LLAMA = {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity", "split_digits": True,
         "remove_extra_whitespaces": False, "allow_whitespace_only_pieces": True}  # fmt: skip
GEMMA = {"add_dummy_prefix": False, "pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3, "pad_piece": "<pad>",
         "bos_piece": "<bos>", "eos_piece": "<eos>", "user_defined_symbols": ["<mask>", "\n\n"]}  # fmt: skip
T5 = {"model_type": "unigram", "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1, "pad_piece": "<pad>",
      "hard_vocab_limit": False}  # fmt: skip
TRAINED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "llama": (LLAMA, {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}, "tokenizer.model"),
    "llama, legacy": (LLAMA, {"tokenizer_class": "LlamaTokenizer", "legacy": True}, "tokenizer.model"),
    "gemma": (LLAMA | GEMMA, {"tokenizer_class": "GemmaTokenizer", "add_bos_token": True}, "tokenizer.model"),
    "t5": (T5, {"tokenizer_class": "T5Tokenizer"}, "spiece.model"),
}


@pytest.mark.parametrize("name", TRAINED)
def test_trained_models_equal_the_library_and_transformers(name: str, tmp_path: Path) -> None:
    library = pytest.importorskip("sentencepiece", reason="the SentencePiece library is not installed")
    options, config, file = TRAINED[name]
    out = io.BytesIO()
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=out, vocab_size=420 if "bpe" in str(options) else 120,
        character_coverage=1.0, minloglevel=2, **options,
    )  # fmt: skip
    (tmp_path / file).write_bytes(out.getvalue())
    ours = Tokenizer.load(write(tmp_path, tokenizer_config=config))
    theirs = getattr(transformers, config["tokenizer_class"]).from_pretrained(tmp_path)
    assert ours.special_tokens_map == theirs.special_tokens_map and ours.vocab_size == len(theirs)
    assert_same(ours, theirs, MIXED + EDGE_CASES + LONG[:1])
    reference = library.SentencePieceProcessor(model_file=str(tmp_path / file))
    for text in MIXED:
        if not text.startswith(" ") and "<" not in text:
            assert ours.encode(text) == reference.encode(text), text
