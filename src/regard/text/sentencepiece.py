"""SentencePiece models (Kudo & Richardson 2018): `tokenizer.model` and `spiece.model`, a small protocol buffer.

Each piece has a score. Unigram (Kudo 2018) segments a string into the pieces with the highest sum of scores;
byte-pair encoding repeatedly merges the adjacent pair that forms the piece with the highest score. A space is written
as ▁, and with byte fallback a character that no piece covers becomes its UTF-8 bytes. The normalizer is stored as a
compiled character map, which `tokenizers` can run. As in `transformers`, a string that starts with a space gets no
additional ▁; the SentencePiece library would add one.
"""

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from regard.text.slow_tokenizers import Converted, bos_eos_processor, select_converter, token_with_id
from regard.text.untrusted_input import library_errors, read_bytes

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # piece types
UNIGRAM, BPE = 1, 2  # model types
MAX_PIECE_CHARACTERS = 512  # published pieces have about thirty at most
SENTINELS = 100  # T5's <extra_id_0> …, one per masked span


@dataclass(frozen=True)
class SentencePieceModel:
    file: Path
    pieces: list[str]
    scores: list[float]
    types: list[int]
    model_type: int
    unk_id: int
    byte_fallback: bool
    charsmap: bytes  # the compiled normalizer; empty for none
    remove_extra_whitespaces: bool


def convert_sentencepiece(file: Path, config: Mapping[str, Any], model_config: Mapping[str, Any]) -> Converted:
    return select_converter(file, CONVERTERS, config, model_config)(parse_model(file), config)


def convert_llama(model: SentencePieceModel, config: Mapping[str, Any]) -> Converted:
    defaults = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    core = tokenizers.Tokenizer(build_bpe(model))
    prefix_space = config.get("add_prefix_space") is not False
    scheme = "never" if not prefix_space else "always" if config.get("legacy") else "first"
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    core.decoder = build_decoder(prefix_space)
    add_special_pieces(core, model)
    core.post_processor = bos_eos_processor(core, model.file, config, defaults)
    return core, defaults


def convert_gemma(model: SentencePieceModel, config: Mapping[str, Any]) -> Converted:
    defaults = {f"{name}_token": f"<{name}>" for name in ("bos", "eos", "unk", "pad", "mask")}
    core = tokenizers.Tokenizer(build_bpe(model))
    core.normalizer = normalizers.Replace(" ", "▁")
    core.decoder = build_decoder(prefix_space=False)
    add_special_pieces(core, model)
    core.post_processor = bos_eos_processor(core, model.file, config, defaults)
    return core, defaults


def convert_t5(model: SentencePieceModel, config: Mapping[str, Any]) -> Converted:
    defaults = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    if model.model_type != UNIGRAM or model.byte_fallback:
        raise ValueError(
            f"{model.file}: expected a Unigram model without byte fallback, as in T5; load and save the folder "
            "with transformers, which writes tokenizer.json"
        )
    sentinels = [f"<extra_id_{n}>" for n in reversed(range(SENTINELS))]
    vocab = [*zip(model.pieces, model.scores, strict=True), *((piece, 0.0) for piece in sentinels)]
    with library_errors(f"{model.file} is damaged; download it again"):
        core = tokenizers.Tokenizer(models.Unigram(vocab, model.unk_id, byte_fallback=False))
        if model.charsmap:
            core.normalizer = normalizers.Precompiled(model.charsmap)
    metaspace = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), metaspace])
    core.decoder = decoders.Metaspace(prepend_scheme="always", split=True)
    core.add_special_tokens([AddedToken(piece, normalized=False) for piece in sentinels])
    core.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[token_with_id(core, model.file, "</s>")]
    )
    add_special_pieces(core, model)
    return core, defaults


CONVERTERS: dict[str, Callable[[SentencePieceModel, Mapping[str, Any]], Converted]] = {
    "LlamaTokenizer": convert_llama,
    "GemmaTokenizer": convert_gemma,
    "T5Tokenizer": convert_t5,
}


def build_decoder(prefix_space: bool) -> decoders.Decoder:
    strip = [decoders.Strip(" ", 1, 0)] if prefix_space else []
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])


def add_special_pieces(core: tokenizers.Tokenizer, model: SentencePieceModel) -> None:
    """Make control pieces special tokens, and user-defined pieces added tokens."""
    types = zip(model.pieces, model.types, strict=True)
    added = [(piece, type) for piece, type in types if type in (CONTROL, USER_DEFINED)]
    core.add_tokens([AddedToken(piece, normalized=False, special=type == CONTROL) for piece, type in added])


def build_bpe(model: SentencePieceModel) -> models.BPE:
    if model.model_type != BPE or model.charsmap or model.remove_extra_whitespaces:
        raise ValueError(
            f"{model.file}: expected byte-pair encoding without a normalizer; load and save the folder with "
            "transformers, which writes tokenizer.json"
        )
    vocab = {piece: id for id, piece in enumerate(model.pieces)}
    merges = merges_from_scores(model.file, model.pieces, model.scores, model.types)
    unk = model.pieces[model.unk_id]
    with library_errors(f"{model.file} is damaged; download it again"):
        return models.BPE(vocab, merges, unk_token=unk, fuse_unk=True, byte_fallback=model.byte_fallback)


def merges_from_scores(
    file: Path, pieces: Sequence[str], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """All pairs of pieces that concatenate to a third piece, ordered by the score of that piece, highest first."""
    parts = {piece for piece, type in zip(pieces, types, strict=True) if type in (NORMAL, USER_DEFINED, UNUSED)}
    ids = sorted((id for id, type in enumerate(types) if type in (NORMAL, USER_DEFINED)), key=lambda id: -scores[id])
    merges = []
    for piece in (pieces[id] for id in ids):
        if len(piece) > MAX_PIECE_CHARACTERS:
            raise ValueError(f"{file}: a piece has {len(piece)} characters; at most {MAX_PIECE_CHARACTERS} are allowed")
        pairs = ((piece[:n], piece[n:]) for n in range(1, len(piece)))
        merges += [pair for pair in pairs if pair[0] in parts and pair[1] in parts]
    return merges


def parse_model(file: Path) -> SentencePieceModel:
    """Parse the message `ModelProto`: pieces (field 1), trainer spec (2) and normalizer spec (3)."""
    pieces, scores, types = [], [], []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    try:
        for number, value in parse_fields(read_bytes(file)):
            if number == 1:
                piece = dict(parse_fields(value))
                pieces.append(piece.get(1, b"").decode("utf-8"))
                scores.append(piece.get(2, 0.0))
                types.append(piece.get(3, NORMAL))
            elif number == 2:
                trainer = dict(parse_fields(value))
            elif number == 3:
                normalizer = dict(parse_fields(value))
        unk_id = trainer.get(40, 0)
        if len(set(pieces)) < len(pieces) or not 0 <= unk_id < len(pieces):
            raise ValueError(f"{len(pieces)} pieces, {len(set(pieces))} of them distinct, and unk_id={unk_id}")
        return SentencePieceModel(
            file, pieces, scores, types,
            model_type=trainer.get(3, UNIGRAM),
            unk_id=unk_id,
            byte_fallback=bool(trainer.get(35)),
            charsmap=normalizer.get(2, b""),
            remove_extra_whitespaces=bool(normalizer.get(4, True)),
        )  # fmt: skip
    except (ValueError, TypeError, AttributeError, IndexError, struct.error) as error:
        raise ValueError(f"{file} is damaged or not a SentencePiece model ({error}); download it again") from error


def parse_fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """The numbered fields of a protocol buffer message; strings and nested messages are bytes."""
    at = 0
    while at < len(message):
        key, at = parse_varint(message, at)
        wire_type = key & 7
        if wire_type == 0:
            value, at = parse_varint(message, at)
        elif wire_type in (1, 5):
            size = 8 if wire_type == 1 else 4
            (value,), at = struct.unpack_from("<d" if wire_type == 1 else "<f", message, at), at + size
        elif wire_type == 2:
            size, at = parse_varint(message, at)
            value, at = message[at : at + size], at + size
            if at > len(message):
                raise ValueError("a field extends past the end of the message")
        else:
            raise ValueError(f"a field has wire type {wire_type}")
        yield key >> 3, value


def parse_varint(message: bytes, at: int) -> tuple[int, int]:
    """The integer that starts at byte `at`, and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        value |= (message[at] & 127) << shift
        at += 1
        if message[at - 1] < 128:
            return value, at
    raise ValueError("an integer has more than ten bytes")
