"""Vocabularies in GGUF files: there and back, and as `transformers` reads them."""

import struct
from pathlib import Path

import pytest
import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, trainers

from regard.checkpoint.gguf import export_gguf
from regard.gguf_header import GGUFError
from regard.text.chat import DEFAULT_TEMPLATE
from regard.text.gguf_metadata import metadata
from regard.text.splits import SAME, rule
from regard.text.tokenizer import Tokenizer
from regard.text.train import bpe, character
from tests.checkpoint.gguf.files import LLAMA, tiny
from tests.text.mixed import MIXED

ENOUGH = ["the cat sat on the mat, the dog sat on the log; 1 2 12 123 let's see what we'll do"] * 3


def written(tokenizer: Tokenizer, folder: Path, spare: int = 0) -> Path:
    vocab = tokenizer.vocab_size + spare
    export_gguf(tiny(LLAMA | {"vocab_size": vocab}), folder / "x.gguf", "llama", "f32", metadata(tokenizer, vocab))
    return folder / "x.gguf"


def bytes_by(name: str) -> Tokenizer:
    made = bpe(ENOUGH, 294)
    made.core.pre_tokenizer = rule(name)
    return made


def sentence_pieces(leading: bool = True) -> Tokenizer:
    """SentencePiece's kind: ▁ for spaces, bytes for what no piece covers."""
    marks = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    core = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps = [normalizers.Prepend("▁")] if leading else []
    core.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    core.train_from_iterator(ENOUGH, trainers.BpeTrainer(vocab_size=340, special_tokens=marks, show_progress=False))
    state = tokenizers.Tokenizer(
        models.BPE(core.get_vocab(), merges_of(core), unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    state.normalizer = core.normalizer
    strip = [decoders.Strip(" ", 1, 0)] if leading else []
    state.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    state.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(state, bos="<s>", eos="</s>", chat_template=DEFAULT_TEMPLATE)


def merges_of(core: tokenizers.Tokenizer) -> list[tuple[str, str]]:
    import json

    return [tuple(pair) for pair in json.loads(core.to_str())["model"]["merges"]]


MADE = {
    **{f"bytes, {name}": lambda name=name: bytes_by(name) for name in SAME},
    "sentence pieces": sentence_pieces,
    "sentence pieces, no space before": lambda: sentence_pieces(leading=False),
}


@pytest.mark.parametrize("name", MADE)
def test_there_and_back(name: str, tmp_path: Path) -> None:
    ours = MADE[name]()
    back = Tokenizer.load(written(ours, tmp_path, spare=3))
    assert (back.bos, back.eos, back.pad, back.stops) == (ours.bos, ours.eos, ours.pad, ours.stops)
    assert (back.chat_template, back.opening) == (ours.chat_template, ours.opening)
    for text in MIXED:
        for special in (False, True):
            ids = ours.encode(text, special)
            assert back.encode(text, special) == ids, text
            assert back.decode(ids, special) == ours.decode(ids, special), text


@pytest.mark.parametrize("name", ["bytes, gpt-2", "bytes, llama-bpe", "bytes, qwen2", "sentence pieces"])
def test_transformers_reads_the_same(name: str, tmp_path: Path) -> None:
    file = written(MADE[name](), tmp_path)
    ours, theirs = Tokenizer.load(file), transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    for text in MIXED:
        if "sentence" in name and text.startswith(" "):
            continue  # theirs puts no ▁ before a space, which SentencePiece and llama.cpp do
        assert ours.encode(text, special=True) == theirs.encode(text, add_special_tokens=False), text


def test_a_beginning_is_kept(tmp_path: Path) -> None:
    ours = sentence_pieces()
    file = written(ours, tmp_path)
    content = file.read_bytes()
    at = content.index(b"tokenizer.ggml.add_bos_token") + len("tokenizer.ggml.add_bos_token")
    file.write_bytes(content[: at + 4] + struct.pack("<?", True) + content[at + 5 :])
    assert Tokenizer.load(file).opening == (ours.bos,)


def test_what_cannot_be_said_is_refused() -> None:
    with pytest.raises(GGUFError, match="cannot hold a vocabulary by WordLevel"):
        metadata(character(["abc"]), 100)
    with pytest.raises(GGUFError, match="cannot hold 294 tokens for a model of 200"):
        metadata(bpe(ENOUGH, 294), 200)
    odd = bpe(ENOUGH, 294)
    odd.core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    with pytest.raises(GGUFError, match="no name for how this vocabulary cuts words"):
        metadata(odd, 294)


HOSTILE = {
    "an unknown kind": ((b"ggml.model", 12, b"gpt9"), "model='gpt9' is no vocabulary that is read"),
    "an unknown rule": ((b"ggml.pre", 12, b"gpt-9"), "pre='gpt-9' names no rule"),
    "a marker outside": ((b"eos_token_id", 4, struct.pack("<I", 9999)), "eos_token_id=9999, but there are 294"),
    "a marker of another type": ((b"eos_token_id", 0, struct.pack("<I", 6)), "eos_token_id=.* should be int"),
    "a merge of nothing": ((b"ggml.merges", 25, b"_"), "expected two tokens that join to one"),
    "types for some": ((b"ggml.token_type", 8, struct.pack("<Q", 100)), "should be as many|goes on"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_vocabulary_is_refused_by_name(name: str, tmp_path: Path) -> None:
    (before, skip, new), message = HOSTILE[name]
    file = written(bpe(ENOUGH, 294), tmp_path)
    content = file.read_bytes()
    at = content.index(before) + len(before) + skip
    file.write_bytes(content[:at] + new + content[at + len(new) :])
    with pytest.raises(GGUFError, match=message) as caught:
        Tokenizer.load(file)
    assert str(file) in str(caught.value)
