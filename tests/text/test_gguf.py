"""Tokenizers in GGUF files: they round-trip, and `transformers` encodes the same ids with them."""

import json
import struct
from pathlib import Path

import pytest
import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, trainers

from regard.checkpoint.gguf import export_gguf
from regard.gguf_header import GGUFError
from regard.text.chat import DEFAULT_TEMPLATE
from regard.text.pre_tokenization import GGUF_NAMES, build_pre_tokenizer
from regard.text.tokenizer import Tokenizer
from regard.text.train import bpe, character
from regard.text.write_gguf import gguf_metadata
from tests.checkpoint.gguf.tiny_models import LLAMA, build_tiny
from tests.text.sample_texts import MIXED

TEXTS = ["the cat sat on the mat, the dog sat on the log; 1 2 12 123 let's see what we'll do"] * 3


def write_gguf(tokenizer: Tokenizer, folder: Path, unused: int = 0) -> Path:
    vocab = tokenizer.vocab_size + unused
    export_gguf(
        build_tiny(LLAMA | {"vocab_size": vocab}), folder / "x.gguf", "llama", "f32", gguf_metadata(tokenizer, vocab)
    )
    return folder / "x.gguf"


def byte_level(rule: str) -> Tokenizer:
    tokenizer = bpe(TEXTS, 294)
    tokenizer.core.pre_tokenizer = build_pre_tokenizer(rule)
    return tokenizer


def sentencepiece(prefix_space: bool = True) -> Tokenizer:
    """As in SentencePiece: ▁ for spaces, and byte fallback."""
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    core = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps = [normalizers.Prepend("▁")] if prefix_space else []
    core.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    core.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=340, special_tokens=special, show_progress=False))
    rebuilt = tokenizers.Tokenizer(
        models.BPE(core.get_vocab(), merges_of(core), unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    rebuilt.normalizer = core.normalizer
    strip = [decoders.Strip(" ", 1, 0)] if prefix_space else []
    rebuilt.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    rebuilt.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(rebuilt, bos="<s>", eos="</s>", chat_template=DEFAULT_TEMPLATE)


def merges_of(core: tokenizers.Tokenizer) -> list[tuple[str, str]]:
    return [tuple(pair) for pair in json.loads(core.to_str())["model"]["merges"]]


TOKENIZERS = {
    **{f"byte-level, {rule}": lambda rule=rule: byte_level(rule) for rule in GGUF_NAMES},
    "sentencepiece": sentencepiece,
    "sentencepiece, no prefix space": lambda: sentencepiece(prefix_space=False),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokenizers_round_trip_through_a_file(name: str, tmp_path: Path) -> None:
    ours = TOKENIZERS[name]()
    reloaded = Tokenizer.load(write_gguf(ours, tmp_path, unused=3))
    assert (reloaded.bos, reloaded.eos, reloaded.pad, reloaded.stop_ids) == (
        ours.bos,
        ours.eos,
        ours.pad,
        ours.stop_ids,
    )
    assert (reloaded.chat_template, reloaded.prefix_ids) == (ours.chat_template, ours.prefix_ids)
    for text in MIXED:
        for special in (False, True):
            ids = ours.encode(text, special)
            assert reloaded.encode(text, special) == ids, text
            assert reloaded.decode(ids, special) == ours.decode(ids, special), text


@pytest.mark.parametrize("name", ["byte-level, gpt-2", "byte-level, llama-bpe", "byte-level, qwen2", "sentencepiece"])
def test_ids_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    file = write_gguf(TOKENIZERS[name](), tmp_path)
    ours, theirs = Tokenizer.load(file), transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    for text in MIXED:
        if "sentence" in name and text.startswith(" "):
            continue  # transformers adds no ▁ before a space; SentencePiece and llama.cpp do
        assert ours.encode(text, special=True) == theirs.encode(text, add_special_tokens=False), text


def test_add_bos_token_is_read(tmp_path: Path) -> None:
    ours = sentencepiece()
    file = write_gguf(ours, tmp_path)
    content = file.read_bytes()
    start = content.index(b"tokenizer.ggml.add_bos_token") + len("tokenizer.ggml.add_bos_token")
    file.write_bytes(content[: start + 4] + struct.pack("<?", True) + content[start + 5 :])
    assert Tokenizer.load(file).prefix_ids == (ours.bos,)


def test_a_tokenizer_that_gguf_cannot_hold_is_refused() -> None:
    with pytest.raises(GGUFError, match="cannot hold a WordLevel vocabulary"):
        gguf_metadata(character(["abc"]), 100)
    with pytest.raises(GGUFError, match="cannot hold 294 tokens for a model with vocab=200"):
        gguf_metadata(bpe(TEXTS, 294), 200)
    unnamed = bpe(TEXTS, 294)
    unnamed.core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    with pytest.raises(GGUFError, match="no name for this tokenizer's pre-tokenizer"):
        gguf_metadata(unnamed, 294)


DAMAGED = {  # name: (key, bytes to skip after it, new bytes), message
    "an unknown model": ((b"ggml.model", 12, b"gpt9"), "model='gpt9' is not supported"),
    "an unknown pre-tokenizer": ((b"ggml.pre", 12, b"gpt-9"), "pre='gpt-9' is not supported"),
    "eos outside the vocabulary": (
        (b"eos_token_id", 4, struct.pack("<I", 9999)),
        "eos_token_id=9999, but the ids are 0 to 293",
    ),
    "eos of another type": ((b"eos_token_id", 0, struct.pack("<I", 6)), "eos_token_id=.* should be int"),
    "a merge of one token": ((b"ggml.merges", 25, b"_"), "expected two tokens whose concatenation is a token"),
    "too few types": ((b"ggml.token_type", 8, struct.pack("<Q", 100)), "numbers must be equal|are left"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_metadata_is_refused(name: str, tmp_path: Path) -> None:
    (key, skip, new), message = DAMAGED[name]
    file = write_gguf(bpe(TEXTS, 294), tmp_path)
    content = file.read_bytes()
    start = content.index(key) + len(key) + skip
    file.write_bytes(content[:start] + new + content[start + len(new) :])
    with pytest.raises(GGUFError, match=message) as caught:
        Tokenizer.load(file)
    assert str(file) in str(caught.value)
