"""Tokenizers saved without `tokenizer.json`, which `transformers` calls slow: a vocabulary file and a class name.

The file lists only the pieces. The class fixes the rest: normalizer, pre-tokenizer, decoder and post-processor. This
module converts `vocab.txt` (WordPiece) and `vocab.json` with `merges.txt` (byte-level BPE); sentencepiece.py converts
SentencePiece models. BERT (Devlin et al. 2018) splits at whitespace and punctuation; GPT-2 (Radford et al. 2019) works
on bytes; RoBERTa (Liu et al. 2019) adds <s> … </s> to GPT-2's rules; Qwen2 normalizes to NFC and splits digits.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from regard.text.pre_tokenization import build_pre_tokenizer
from regard.text.untrusted_input import library_errors, read_bytes, read_text

ConverterType = TypeVar("ConverterType")
Converted = tuple[tokenizers.Tokenizer, dict[str, str]]  # the tokenizer and the class's default special tokens

# Classes with the same rules, and the model types that use them if the folder names no class.
ALIASES = {
    "BertTokenizer": ("DistilBertTokenizer", "ElectraTokenizer", "bert", "distilbert", "electra"),
    "GPT2Tokenizer": ("CodeGenTokenizer", "gpt2", "gptj", "opt", "phi"),
    "RobertaTokenizer": (
        "BartTokenizer",
        "LEDTokenizer",
        "LongformerTokenizer",
        "bart",
        "led",
        "longformer",
        "roberta",
    ),
    "Qwen2Tokenizer": ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
    "LlamaTokenizer": ("llama", "mistral", "mixtral", "phi3"),
    "GemmaTokenizer": ("gemma2", "gemma3_text", "recurrent_gemma"),
    "T5Tokenizer": ("MT5Tokenizer", "t5", "mt5", "switch_transformers"),
}
CLASSES = {name: cls for cls, aliases in ALIASES.items() for name in (cls, *aliases)}


def select_converter(
    file: Path, converters: Mapping[str, ConverterType], config: Mapping[str, Any], model_config: Mapping[str, Any]
) -> ConverterType:
    """The converter for the class that `tokenizer_config.json` names, else for the model type."""
    name = config.get("tokenizer_class") or model_config.get("tokenizer_class") or model_config.get("model_type")
    cls = CLASSES.get(str(name).removesuffix("Fast"), "")
    if cls not in converters:
        raise ValueError(
            f"{file} needs the rules of {name!r:.80}, which are not supported (supported: {', '.join(converters)}); "
            "load and save the folder with transformers, which writes tokenizer.json"
        )
    return converters[cls]


def convert_vocabulary(file: Path, config: Mapping[str, Any], model_config: Mapping[str, Any]) -> Converted:
    return select_converter(file, CONVERTERS, config, model_config)(file, config)


def convert_bert(file: Path, config: Mapping[str, Any]) -> Converted:
    defaults = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "sep", "pad", "cls", "mask")}
    unk, sep, cls = (special_token(config, name, defaults) for name in ("unk_token", "sep_token", "cls_token"))
    lines = read_text(file).removesuffix("\n").split("\n")
    vocab = {line.rstrip(): id for id, line in enumerate(lines)}
    core = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token=unk))
    core.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=bool(config.get("tokenize_chinese_chars", True)),
        strip_accents=None if config.get("strip_accents") is None else bool(config["strip_accents"]),
        lowercase=bool(config.get("do_lower_case", True)),
    )
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece()
    core.post_processor = processors.BertProcessing(token_with_id(core, file, sep), token_with_id(core, file, cls))
    return core, defaults


def byte_level_bpe(file: Path) -> tokenizers.Tokenizer:
    vocab, merges = file.with_name("vocab.json"), file.with_name("merges.txt")
    for path in (vocab, merges):
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing; byte-pair encoding needs {vocab.name} and {merges.name}")
        read_bytes(path)  # checks the size
    with library_errors(f"{vocab} and {merges.name} do not match; download them again"):
        core = tokenizers.Tokenizer(models.BPE(*models.BPE.read_file(str(vocab), str(merges))))
    core.decoder = decoders.ByteLevel()
    return core


def convert_gpt2(file: Path, config: Mapping[str, Any]) -> Converted:
    core, defaults = byte_level_bpe(file), dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>")
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(config.get("add_prefix_space")))
    core.post_processor = bos_eos_processor(core, file, config, defaults)
    return core, defaults


def convert_roberta(file: Path, config: Mapping[str, Any]) -> Converted:
    defaults = {"bos_token": "<s>", "eos_token": "</s>", "sep_token": "</s>", "cls_token": "<s>"}
    defaults |= {f"{name}_token": f"<{name}>" for name in ("unk", "pad", "mask")}
    core, prefix_space = byte_level_bpe(file), bool(config.get("add_prefix_space"))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    sep, cls = (token_with_id(core, file, special_token(config, name, defaults)) for name in ("sep_token", "cls_token"))
    core.post_processor = processors.RobertaProcessing(sep, cls, add_prefix_space=prefix_space)
    return core, defaults


def convert_qwen2(file: Path, config: Mapping[str, Any]) -> Converted:
    core, defaults = byte_level_bpe(file), dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>")
    core.normalizer = normalizers.NFC()
    core.pre_tokenizer = build_pre_tokenizer("qwen2")
    core.post_processor = bos_eos_processor(core, file, config, defaults)
    return core, defaults


CONVERTERS: dict[str, Callable[[Path, Mapping[str, Any]], Converted]] = {
    "BertTokenizer": convert_bert,
    "GPT2Tokenizer": convert_gpt2,
    "RobertaTokenizer": convert_roberta,
    "Qwen2Tokenizer": convert_qwen2,
}


def token_with_id(core: tokenizers.Tokenizer, file: Path, token: str) -> tuple[str, int]:
    id = core.token_to_id(token)
    if id is None:
        raise ValueError(
            f"{file}: the post-processor needs {token!r}, which is not among the {core.get_vocab_size()} pieces; "
            "download the folder again"
        )
    return token, id


def special_token(config: Mapping[str, Any], name: str, defaults: Mapping[str, str]) -> str:
    entry = config.get(name) or defaults.get(name)
    token = entry.get("content") if isinstance(entry, dict) else entry
    if not isinstance(token, str):
        raise ValueError(f"{name} is {entry!r:.80}; expected a string or an object with `content`")
    return token


def bos_eos_processor(
    core: tokenizers.Tokenizer, file: Path, config: Mapping[str, Any], defaults: Mapping[str, str]
) -> processors.PostProcessor:
    """A post-processor that adds bos and eos if `add_bos_token` and `add_eos_token` are set."""
    tokens = {
        name: special_token(config, name, defaults) for name in ("bos_token", "eos_token") if config.get(f"add_{name}")
    }
    bos, eos = tokens.get("bos_token"), tokens.get("eos_token")

    def template(sequence: str, type_id: int) -> str:
        return " ".join(f"{part}:{type_id}" for part in (bos, sequence, eos) if part)

    return processors.TemplateProcessing(
        single=template("$A", 0),
        pair=f"{template('$A', 0)} {template('$B', 1)}",
        special_tokens=[token_with_id(core, file, token) for token in dict.fromkeys(tokens.values())],
    )
