"""The vocabulary in a GGUF file as a tokenizer; gguf_metadata.py is the way back.

Two kinds are known there: "gpt2", byte-pair encoding over bytes, with its merges and a name for how text is cut into
words before; and "llama", SentencePiece's, where a score for each piece says what is joined first, a space is written ▁
and what no piece covers falls back to bytes. The second is read as merges: a piece's joins, best piece first.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

from regard.gguf_header import GGUFError, Header, read_header
from regard.text.folder import TokenizerFiles
from regard.text.sentencepiece import CONTROL, NORMAL, OWN, merges
from regard.text.splits import BEGINS, WHOLE, split

PREFIX = "tokenizer.ggml."


def read_gguf(file: Path) -> TokenizerFiles:
    """Marker tokens, template and what ends a generation come along."""
    words = Words(read_header(file))
    kind = words.get("model", str)
    if kind not in ("gpt2", "llama"):
        raise GGUFError(f"{file}: {PREFIX}model={kind!r} is no vocabulary that is read; gpt2 and llama are")
    core = byte_level(words) if kind == "gpt2" else sentence_pieces(words)
    for type, special in ((CONTROL, True), (OWN, False)):
        core.add_tokens([AddedToken(p, special=special, normalized=False) for p in words.of_type(type)])
    bos, eos, pad, end = (words.marker(name) for name in ("bos", "eos", "padding", "eot"))
    if bos is not None and words.get("add_bos_token", bool, kind == "llama" or words.get("pre", str) in BEGINS):
        core.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, words.ids[bos])]
        )
    stops = () if end is None else (words.ids[end],)
    names = {f"{name}_token": piece for name, piece in (("bos", bos), ("eos", eos), ("pad", pad)) if piece is not None}
    return TokenizerFiles(core, names, words.header.get("tokenizer.chat_template", str), stops, tidy=False)


class Words:
    """The vocabulary's part of the metadata."""

    def __init__(self, header: Header):
        self.header = header
        self.pieces: list[str] = self.get("tokens", list, [])
        self.types: Sequence[int] = self.header.metadata.get(f"{PREFIX}token_type", [NORMAL] * len(self.pieces))
        self.ids = {piece: id for id, piece in enumerate(self.pieces)}
        if not self.pieces or len(self.ids) < len(self.pieces) or len(self.types) != len(self.pieces):
            raise GGUFError(
                f"{header.file}: {PREFIX}tokens has {len(self.pieces)} pieces, {len(self.ids)} of them different, and "
                f"{PREFIX}token_type {len(self.types)} entries; they should be as many"
            )

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        return self.header.get(PREFIX + key, kind, default)

    def of_type(self, type: int) -> list[str]:
        return [piece for piece, its in zip(self.pieces, self.types, strict=True) if its == type and piece]

    def marker(self, name: str) -> str | None:
        id = self.get(f"{name}_token_id", int)
        if id is None:
            return None
        if id >= len(self.pieces):
            raise GGUFError(
                f"{self.header.file}: {PREFIX}{name}_token_id={id}, but there are {len(self.pieces)} tokens"
            )
        return self.pieces[id]

    def merges(self) -> list[tuple[str, str]]:
        pairs = [tuple(merge.split(" ")) for merge in self.get("merges", list, [])]
        for pair in pairs:
            if len(pair) != 2 or not {*pair, "".join(pair)} <= self.ids.keys():
                raise GGUFError(f"{self.header.file}: {PREFIX}merges has {' '.join(pair)!r:.80}; expected two tokens "
                                "that join to one")  # fmt: skip
        return pairs

    def joins(self) -> list[tuple[str, str]]:
        """Every way to make a piece of two others; the piece with the highest score first."""
        scores = self.header.metadata.get(f"{PREFIX}scores")
        if scores is None or len(scores) != len(self.pieces):
            raise GGUFError(
                f"{self.header.file}: {PREFIX}scores should have a number for each of {len(self.ids)} tokens"
            )
        try:
            return merges(self.header.file, self.pieces, scores, self.types)
        except ValueError as error:
            raise GGUFError(str(error)) from error


def byte_level(words: Words) -> tokenizers.Tokenizer:
    name = words.get("pre", str, "gpt-2")
    core = tokenizers.Tokenizer(models.BPE(words.ids, words.merges(), ignore_merges=name in WHOLE))
    core.pre_tokenizer = split(name, words.header.file)
    core.decoder = decoders.ByteLevel()
    return core


def sentence_pieces(words: Words) -> tokenizers.Tokenizer:
    unknown = words.marker("unknown")
    model = models.BPE(words.ids, words.joins(), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    core = tokenizers.Tokenizer(model)
    leading = words.get("add_space_prefix", bool, True)
    steps = [normalizers.Prepend("▁")] if leading else []
    core.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if leading else []
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return core
