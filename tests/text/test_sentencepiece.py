"""SentencePiece models: against the two algorithms written out, against the library, and against `transformers`."""

import io
import struct
from math import inf
from pathlib import Path
from typing import Any

import pytest
import transformers

from regard.text.sentencepiece import BPE, BYTE, CONTROL, NORMAL, OWN, UNIGRAM, UNKNOWN
from regard.text.tokenizer import Tokenizer
from tests.text.folders import BYTES, TEXTS, write
from tests.text.mixed import LONG, MIXED, MORE
from tests.text.test_folders import same

WORDS = {"▁": -3.0, "▁t": -4, "▁th": -5, "▁the": -4.5, "he": -4.2, "in": -5.1, "ing": -5.5, "▁a": -4.1, "at": -4.4,
         "cat": -6.5, "▁cat": -7, "ca": -6.1, "▁▁": -6, "日本": -6.2}  # fmt: skip
LETTERS = {char: -8.0 - rank / 100 for rank, char in enumerate("abcdefghijklmnopqrstuvwxyz.,;'!日本")}
MARKS = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL}
PIECES = [(text, 0.0, type) for text, type in MARKS.items()]
PIECES += [(text, float(score), NORMAL) for text, score in (WORDS | LETTERS).items()]
SAID = ["the cat", "  the cating  that,", "thethe 日本日 the", "", "a", "catcatcat! hat"]


def number(value: int) -> bytes:
    low = value & 127
    return bytes([low]) if value < 128 else bytes([low | 128]) + number(value >> 7)


def field(key: int, value: Any) -> bytes:
    if isinstance(value, float):
        return number(key << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return number(key << 3) + number(value)
    content = value.encode() if isinstance(value, str) else value
    return number(key << 3 | 2) + number(len(content)) + content


def model(pieces: list[tuple[str, float, int]], kind: int, bytes: bool = False, plain: bool = True) -> bytes:
    written = b"".join(field(1, field(1, text) + field(2, score) + field(3, type)) for text, score, type in pieces)
    unknown = next(id for id, piece in enumerate(pieces) if piece[2] == UNKNOWN)
    normal_form = field(4, int(not plain)) + field(3, 1)
    return written + field(2, field(3, kind) + field(35, int(bytes)) + field(40, unknown)) + field(3, normal_form)


def joined(text: str, scores: dict[str, float]) -> list[str]:
    """Byte-pair encoding as SentencePiece does it: of all neighbours the best piece, of equals the first."""
    parts = list(text)
    while True:
        pairs = [(-scores.get(a + b, -inf), at) for at, (a, b) in enumerate(zip(parts, parts[1:], strict=False))]
        best, at = min(pairs, default=(inf, 0))
        if best == inf:
            return parts
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def likeliest(text: str, scores: dict[str, float]) -> list[str]:
    """Unigram: the cut with the highest sum of scores."""
    best: list[tuple[float, list[str]]] = [(0.0, [])]
    for end in range(1, len(text) + 1):
        starts = [at for at in range(end) if text[at:end] in scores]
        best.append(max((best[at][0] + scores[text[at:end]], [*best[at][1], text[at:end]]) for at in starts))
    return best[-1][1]


@pytest.mark.parametrize(("kind", "cut"), [(BPE, joined), (UNIGRAM, likeliest)])
def test_written_out(kind: int, cut: Any, tmp_path: Path) -> None:
    named = "LlamaTokenizer" if kind == BPE else "T5Tokenizer"
    (tmp_path / "tokenizer.model").write_bytes(model(PIECES, kind))
    ours = Tokenizer.load(write(tmp_path, tokenizer_config={"tokenizer_class": named}))
    for text in SAID:
        words = [f"▁{word}" for word in text.split()] if kind == UNIGRAM else [_marked(text)]
        expected = [piece for word in words for piece in cut(word, WORDS | LETTERS)]
        assert [ours.core.id_to_token(id) for id in ours.encode(text)] == expected
        assert ours.decode(ours.encode(text)) == (" ".join(text.split()) if kind == UNIGRAM else text.removeprefix(" "))


def _marked(text: str) -> str:
    """A space before the first word; as in `transformers`, none where the text has one."""
    return text.replace(" ", "▁") if text.startswith(" ") or not text else "▁" + text.replace(" ", "▁")


def test_bytes_and_own_pieces(tmp_path: Path) -> None:
    pieces = [*PIECES, *((text, 0.0, BYTE) for text in BYTES), ("<tool>", 0.0, OWN)]
    (tmp_path / "tokenizer.model").write_bytes(model(pieces, BPE, bytes=True))
    write(tmp_path, config={"model_type": "llama"}, tokenizer_config={"add_bos_token": True})
    ours = Tokenizer.load(tmp_path)
    assert ours.opening == (ours.bos,) and (ours.bos, ours.eos) == (1, 2)
    tokens = [ours.core.id_to_token(id) for id in ours.encode("é<tool>a</s>")]
    assert tokens == ["▁", "<0xC3>", "<0xA9>", "<tool>", "a", "<0x3C>", "<0x2F>", "s", "<0x3E>"]
    for text in MIXED + LONG[:2]:
        assert ours.decode(ours.encode(text)) == text.removeprefix(" ")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "0 pieces"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", "a number without end"),
        (b"\x0a\x40abc", "goes on past the end"),
        (b"\x0f", "wire type 7"),
        (model(PIECES + PIECES[-1:], BPE), "of them different"),
        (model(PIECES, 3), "this model has another rule"),
        (model(PIECES, BPE, plain=False), "this model has another rule"),
        (model([*PIECES, ("ab" * 600, 0.0, NORMAL)], BPE), "a piece has 1200 characters"),
    ],
)
def test_damage_is_named(content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    write(tmp_path, config={"model_type": "llama"})
    with pytest.raises(ValueError, match=words):
        Tokenizer.load(tmp_path)


def test_other_classes_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "spiece.model").write_bytes(model(PIECES, UNIGRAM))
    with pytest.raises(ValueError, match="the rules of 'PegasusTokenizer' are not known here"):
        Tokenizer.load(write(tmp_path, tokenizer_config={"tokenizer_class": "PegasusTokenizer"}))


PLAIN = {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity", "split_digits": True,
         "remove_extra_whitespaces": False, "allow_whitespace_only_pieces": True}  # fmt: skip
GEMMA = {"add_dummy_prefix": False, "pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3, "pad_piece": "<pad>",
         "bos_piece": "<bos>", "eos_piece": "<eos>", "user_defined_symbols": ["<mask>", "\n\n"]}  # fmt: skip
T5 = {"model_type": "unigram", "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1, "pad_piece": "<pad>",
      "hard_vocab_limit": False}  # fmt: skip
TRAINED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "llama": (PLAIN, {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}, "tokenizer.model"),
    "llama, as it was": (PLAIN, {"tokenizer_class": "LlamaTokenizer", "legacy": True}, "tokenizer.model"),
    "gemma": (PLAIN | GEMMA, {"tokenizer_class": "GemmaTokenizer", "add_bos_token": True}, "tokenizer.model"),
    "t5": (T5, {"tokenizer_class": "T5Tokenizer"}, "spiece.model"),
}


@pytest.mark.parametrize("name", TRAINED)
def test_trained_models(name: str, tmp_path: Path) -> None:
    library = pytest.importorskip("sentencepiece", reason="no SentencePiece library to train with and compare to")
    options, config, file = TRAINED[name]
    out = io.BytesIO()
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=out, vocab_size=420 if "bpe" in str(options) else 120,
        character_coverage=1.0, minloglevel=2, **options,
    )  # fmt: skip
    (tmp_path / file).write_bytes(out.getvalue())
    ours = Tokenizer.load(write(tmp_path, tokenizer_config=config))
    theirs = getattr(transformers, config["tokenizer_class"]).from_pretrained(tmp_path)
    assert ours.names == theirs.special_tokens_map and ours.vocab_size == len(theirs)
    same(ours, theirs, MIXED + MORE + LONG[:1])
    own = library.SentencePieceProcessor(model_file=str(tmp_path / file))
    for text in MIXED:
        if not text.startswith(" ") and "<" not in text:
            assert ours.encode(text) == own.encode(text), text
