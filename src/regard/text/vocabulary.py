"""Bare vocabularies: `vocab.txt` (WordPiece) and `vocab.json` with `merges.txt` (byte-pair encoding).

They say what the pieces are and not how a text is cut before or framed after; that the class says which the folder
names. BERT (Devlin et al. 2018) cuts at spaces and punctuation; GPT-2 (Radford et al. 2019) works on bytes; RoBERTa
(Liu et al. 2019) frames GPT-2's pieces with <s> … </s>; Qwen2 composes characters first and takes digits one by one.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from regard.text.files import read_bytes, read_text
from regard.text.kinds import Made, frame, kind_of, placed, text_of
from regard.text.library import faults
from regard.text.splits import rule


def read_vocabulary(file: Path, config: Mapping[str, Any], model: Mapping[str, Any]) -> Made:
    return kind_of(file, KINDS, config, model)(file, config)


def word_pieces(file: Path, config: Mapping[str, Any]) -> Made:
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "sep", "pad", "cls", "mask")}
    unknown, sep, cls = (text_of(config, name, names) for name in ("unk_token", "sep_token", "cls_token"))
    lines = read_text(file).removesuffix("\n").split("\n")
    vocab = {line.rstrip(): id for id, line in enumerate(lines)}
    core = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token=unknown))
    core.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=bool(config.get("tokenize_chinese_chars", True)),
        strip_accents=None if config.get("strip_accents") is None else bool(config["strip_accents"]),
        lowercase=bool(config.get("do_lower_case", True)),
    )
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece()
    core.post_processor = processors.BertProcessing(placed(core, file, sep), placed(core, file, cls))
    return core, names


def byte_pairs(file: Path) -> tokenizers.Tokenizer:
    vocab, merges = file.with_name("vocab.json"), file.with_name("merges.txt")
    for path in (vocab, merges):
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing; {vocab.name} and {merges.name} belong together")
        read_bytes(path)
    with faults(f"{vocab} and {merges.name} do not fit together; fetch them again"):
        core = tokenizers.Tokenizer(models.BPE(*models.BPE.read_file(str(vocab), str(merges))))
    core.decoder = decoders.ByteLevel()
    return core


def gpt2(file: Path, config: Mapping[str, Any]) -> Made:
    core, names = byte_pairs(file), dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>")
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(config.get("add_prefix_space")))
    core.post_processor = frame(core, file, config, names)
    return core, names


def roberta(file: Path, config: Mapping[str, Any]) -> Made:
    names = {"bos_token": "<s>", "eos_token": "</s>", "sep_token": "</s>", "cls_token": "<s>"}
    names |= {f"{name}_token": f"<{name}>" for name in ("unk", "pad", "mask")}
    core, spaced = byte_pairs(file), bool(config.get("add_prefix_space"))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=spaced)
    sep, cls = (placed(core, file, text_of(config, name, names)) for name in ("sep_token", "cls_token"))
    core.post_processor = processors.RobertaProcessing(sep, cls, add_prefix_space=spaced)
    return core, names


def qwen2(file: Path, config: Mapping[str, Any]) -> Made:
    core, names = byte_pairs(file), dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>")
    core.normalizer = normalizers.NFC()
    core.pre_tokenizer = rule("qwen2")
    core.post_processor = frame(core, file, config, names)
    return core, names


KINDS: dict[str, Callable[[Path, Mapping[str, Any]], Made]] = {
    "BertTokenizer": word_pieces,
    "GPT2Tokenizer": gpt2,
    "RobertaTokenizer": roberta,
    "Qwen2Tokenizer": qwen2,
}
