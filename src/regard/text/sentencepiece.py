"""SentencePiece models (Kudo & Richardson 2018): `tokenizer.model` and `spiece.model`, a small protocol buffer.

Each piece has a score. Unigram (Kudo 2018) cuts a text into the pieces with the highest sum; byte-pair encoding joins
the neighbours that make the best piece, over and over. A space is written ▁, and where the model has them, bytes stand
for characters that no piece covers. A text's normal form comes as a compiled table, which `tokenizers` runs as it is.
As in `transformers`, a text that begins with a space gets no second ▁, which SentencePiece itself would put there.
"""

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from regard.text.files import read_bytes
from regard.text.kinds import Made, frame, kind_of, placed
from regard.text.library import faults

NORMAL, UNKNOWN, CONTROL, OWN, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # types of pieces
UNIGRAM, BPE = 1, 2
LONGEST_JOIN = 512  # characters of a piece that is joined of others; real ones have some thirty
SENTINELS = 100  # of T5: <extra_id_0> … stand for the spans that are left out


@dataclass(frozen=True)
class SentencePieceModel:
    file: Path
    texts: list[str]
    scores: list[float]
    types: list[int]
    kind: int
    unknown: int
    bytes: bool
    normal_form: bytes
    single_spaces: bool


def read_pieces(file: Path, config: Mapping[str, Any], model: Mapping[str, Any]) -> Made:
    return kind_of(file, KINDS, config, model)(parse(file), config)


def llama(pieces: SentencePieceModel, config: Mapping[str, Any]) -> Made:
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    core = tokenizers.Tokenizer(joined(pieces))
    leading = config.get("add_prefix_space") is not False
    scheme = "never" if not leading else "always" if config.get("legacy") else "first"
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    strip = [decoders.Strip(" ", 1, 0)] if leading else []
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return framed(core, pieces, config, names)


def gemma(pieces: SentencePieceModel, config: Mapping[str, Any]) -> Made:
    names = {f"{name}_token": f"<{name}>" for name in ("bos", "eos", "unk", "pad", "mask")}
    core = tokenizers.Tokenizer(joined(pieces))
    core.normalizer = normalizers.Replace(" ", "▁")
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return framed(core, pieces, config, names)


def t5(pieces: SentencePieceModel, config: Mapping[str, Any]) -> Made:
    names = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    if pieces.kind != UNIGRAM or pieces.bytes:
        raise ValueError(f"{pieces.file}: T5's model is Unigram without bytes; this is another one")
    sentinels = [f"<extra_id_{n}>" for n in reversed(range(SENTINELS))]
    vocab = [*zip(pieces.texts, pieces.scores, strict=True), *((piece, 0.0) for piece in sentinels)]
    with faults(f"{pieces.file} is damaged; fetch it again"):
        core = tokenizers.Tokenizer(models.Unigram(vocab, pieces.unknown, byte_fallback=False))
        if pieces.normal_form:
            core.normalizer = normalizers.Precompiled(pieces.normal_form)
    space = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), space])
    core.decoder = decoders.Metaspace(prepend_scheme="always", split=True)
    core.add_special_tokens([AddedToken(piece, normalized=False) for piece in sentinels])
    core.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[placed(core, pieces.file, "</s>")]
    )
    return marked(core, pieces), names


KINDS: dict[str, Callable[[SentencePieceModel, Mapping[str, Any]], Made]] = {
    "LlamaTokenizer": llama,
    "GemmaTokenizer": gemma,
    "T5Tokenizer": t5,
}


def framed(
    core: tokenizers.Tokenizer, pieces: SentencePieceModel, config: Mapping[str, Any], names: dict[str, str]
) -> Made:
    core.post_processor = frame(marked(core, pieces), pieces.file, config, names)
    return core, names


def marked(core: tokenizers.Tokenizer, pieces: SentencePieceModel) -> tokenizers.Tokenizer:
    kept = [(text, type) for text, type in zip(pieces.texts, pieces.types, strict=True) if type in (CONTROL, OWN)]
    core.add_tokens([AddedToken(text, normalized=False, special=type == CONTROL) for text, type in kept])
    return core


def joined(pieces: SentencePieceModel) -> models.BPE:
    """Scores as merges: what the best piece is made of is joined first."""
    if pieces.kind != BPE or pieces.normal_form or pieces.single_spaces:
        raise ValueError(f"{pieces.file}: expected byte-pair encoding of a text as it is; this model has another rule")
    ids = {text: id for id, text in enumerate(pieces.texts)}
    joins = merges(pieces.file, pieces.texts, pieces.scores, pieces.types)
    with faults(f"{pieces.file} is damaged; fetch it again"):
        return models.BPE(ids, joins, unk_token=pieces.texts[pieces.unknown], fuse_unk=True, byte_fallback=pieces.bytes)


def merges(file: Path, texts: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """Every way to make a piece of two others; the piece with the highest score first."""
    parts = {text for text, type in zip(texts, types, strict=True) if type in (NORMAL, OWN, UNUSED)}
    best = sorted((id for id, type in enumerate(types) if type in (NORMAL, OWN)), key=lambda id: -scores[id])
    found = []
    for piece in (texts[id] for id in best):
        if len(piece) > LONGEST_JOIN:
            raise ValueError(f"{file}: a piece has {len(piece)} characters; more than {LONGEST_JOIN} are not joined")
        cuts = ((piece[:n], piece[n:]) for n in range(1, len(piece)))
        found += [cut for cut in cuts if cut[0] in parts and cut[1] in parts]
    return found


def parse(file: Path) -> SentencePieceModel:
    """The message `ModelProto`: pieces, how they were trained, and the normal form."""
    texts, scores, types = [], [], []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    try:
        for number, value in fields(read_bytes(file)):
            if number == 1:
                piece = dict(fields(value))
                texts.append(piece.get(1, b"").decode("utf-8"))
                scores.append(piece.get(2, 0.0))
                types.append(piece.get(3, NORMAL))
            elif number == 2:
                trainer = dict(fields(value))
            elif number == 3:
                normalizer = dict(fields(value))
        unknown = trainer.get(40, 0)
        if len(set(texts)) < len(texts) or not 0 <= unknown < len(texts):
            raise ValueError(f"{len(texts)} pieces, {len(set(texts))} of them different; the unknown one is {unknown}")
        form = normalizer.get(2, b"")
        bytes, single = bool(trainer.get(35)), bool(normalizer.get(4, True))
        return SentencePieceModel(file, texts, scores, types, trainer.get(3, UNIGRAM), unknown, bytes, form, single)
    except (ValueError, TypeError, AttributeError, IndexError, struct.error) as error:
        raise ValueError(f"{file} is damaged or no SentencePiece model ({error}); fetch it again") from error


def fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """The numbered fields of a protocol buffer: whole numbers, floats of both sizes, texts or messages as bytes."""
    at = 0
    while at < len(message):
        key, at = varint(message, at)
        wire = key & 7
        if wire == 0:
            value, at = varint(message, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
            (value,), at = struct.unpack_from("<d" if wire == 1 else "<f", message, at), at + size
        elif wire == 2:
            size, at = varint(message, at)
            value, at = message[at : at + size], at + size
            if at > len(message):
                raise ValueError("a field goes on past the end")
        else:
            raise ValueError(f"a field of wire type {wire}")
        yield key >> 3, value


def varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        value |= (message[at] & 127) << shift
        at += 1
        if message[at - 1] < 128:
            return value, at
    raise ValueError("a number without end")
