"""Tokenizers in GGUF files, read from the metadata; write_gguf.py writes them.

GGUF has two kinds. "gpt2" is byte-level BPE with its merges and llama.cpp's name for the pre-tokenizer. "llama" is
SentencePiece: each piece has a score, a space is written as ▁, and characters that no piece covers fall back to bytes.
SentencePiece scores are converted to merges.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

from regard.gguf_header import GGUFError, Header, read_header
from regard.text.pre_tokenization import LLAMA3_NAMES, pre_tokenizer_from_gguf
from regard.text.sentencepiece import CONTROL, NORMAL, USER_DEFINED, build_decoder, merges_from_scores
from regard.text.tokenizer_folder import TokenizerFiles

PREFIX = "tokenizer.ggml."


def read_gguf(file: Path) -> TokenizerFiles:
    vocabulary = GGUFVocabulary(read_header(file))
    kind = vocabulary.get("model", str)
    if kind not in ("gpt2", "llama"):
        raise GGUFError(f"{file}: {PREFIX}model={kind!r} is not supported; gpt2 and llama are")
    core = build_byte_level(vocabulary) if kind == "gpt2" else build_sentencepiece(vocabulary)
    for type, special in ((CONTROL, True), (USER_DEFINED, False)):
        core.add_tokens([AddedToken(p, special=special, normalized=False) for p in vocabulary.of_type(type)])
    bos, eos, pad, eot = (vocabulary.special_token(name) for name in ("bos", "eos", "padding", "eot"))
    bos_by_default = kind == "llama" or vocabulary.get("pre", str) in LLAMA3_NAMES
    if bos is not None and vocabulary.get("add_bos_token", bool, bos_by_default):
        core.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, vocabulary.ids[bos])]
        )
    stop_ids = () if eot is None else (vocabulary.ids[eot],)
    named = {"bos_token": bos, "eos_token": eos, "pad_token": pad}
    return TokenizerFiles(
        core,
        special_tokens_map={name: token for name, token in named.items() if token is not None},
        chat_template=vocabulary.header.get("tokenizer.chat_template", str),
        stop_ids=stop_ids,
        clean_up_tokenization_spaces=False,
    )


class GGUFVocabulary:
    """The metadata under `tokenizer.ggml.`, validated."""

    def __init__(self, header: Header):
        self.header = header
        self.pieces: list[str] = self.get("tokens", list, [])
        self.types: Sequence[int] = self.header.metadata.get(f"{PREFIX}token_type", [NORMAL] * len(self.pieces))
        self.ids = {piece: id for id, piece in enumerate(self.pieces)}
        if not self.pieces or len(self.ids) < len(self.pieces) or len(self.types) != len(self.pieces):
            raise GGUFError(
                f"{header.file}: {PREFIX}tokens has {len(self.pieces)} pieces, {len(self.ids)} of them distinct, and "
                f"{PREFIX}token_type has {len(self.types)} entries; the three numbers must be equal and positive"
            )

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        return self.header.get(PREFIX + key, kind, default)

    def of_type(self, type: int) -> list[str]:
        types = zip(self.pieces, self.types, strict=True)
        return [piece for piece, piece_type in types if piece_type == type and piece]

    def special_token(self, name: str) -> str | None:
        id = self.get(f"{name}_token_id", int)
        if id is None:
            return None
        if id >= len(self.pieces):
            raise GGUFError(
                f"{self.header.file}: {PREFIX}{name}_token_id={id}, but the ids are 0 to {len(self.pieces) - 1}; "
                "convert the model again"
            )
        return self.pieces[id]

    def merges(self) -> list[tuple[str, str]]:
        pairs = [tuple(merge.split(" ")) for merge in self.get("merges", list, [])]
        for pair in pairs:
            if len(pair) != 2 or not {*pair, "".join(pair)} <= self.ids.keys():
                raise GGUFError(
                    f"{self.header.file}: {PREFIX}merges has {' '.join(pair)!r:.80}; expected two tokens whose "
                    "concatenation is a token"
                )
        return pairs

    def merges_from_scores(self) -> list[tuple[str, str]]:
        scores = self.header.metadata.get(f"{PREFIX}scores")
        if scores is None or len(scores) != len(self.pieces):
            raise GGUFError(
                f"{self.header.file}: {PREFIX}scores has {0 if scores is None else len(scores)} numbers; expected one "
                f"for each of the {len(self.pieces)} tokens"
            )
        try:
            return merges_from_scores(self.header.file, self.pieces, scores, self.types)
        except ValueError as error:
            raise GGUFError(str(error)) from error


def build_byte_level(vocabulary: GGUFVocabulary) -> tokenizers.Tokenizer:
    name = vocabulary.get("pre", str, "gpt-2")
    model = models.BPE(vocabulary.ids, vocabulary.merges(), ignore_merges=name in LLAMA3_NAMES)
    core = tokenizers.Tokenizer(model)
    core.pre_tokenizer = pre_tokenizer_from_gguf(name, vocabulary.header.file)
    core.decoder = decoders.ByteLevel()
    return core


def build_sentencepiece(vocabulary: GGUFVocabulary) -> tokenizers.Tokenizer:
    unk, merges = vocabulary.special_token("unknown"), vocabulary.merges_from_scores()
    model = models.BPE(vocabulary.ids, merges, unk_token=unk, fuse_unk=True, byte_fallback=True)
    core = tokenizers.Tokenizer(model)
    prefix_space = vocabulary.get("add_space_prefix", bool, True)
    prepend = [normalizers.Prepend("▁")] if prefix_space else []
    core.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    core.decoder = build_decoder(prefix_space)
    return core
