"""Read the tokenizer of a Hugging Face folder, written by any version of `transformers`.

`tokenizer.json` holds the complete rules. Older folders hold only a vocabulary: `vocab.txt`, `vocab.json` with
`merges.txt` (slow_tokenizers.py), or a SentencePiece model (sentencepiece.py). Special tokens come from the tokenizer's
configuration files (special_tokens.py), and stop ids from the model's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models

from regard.text.sentencepiece import convert_sentencepiece
from regard.text.slow_tokenizers import Converted, convert_vocabulary
from regard.text.special_tokens import TOKENIZER_CONFIG, SpecialTokens, read_tokenizer_config
from regard.text.untrusted_input import library_errors, read_json, read_text

TOKENIZER, CHAT_TEMPLATE, MORE_CHAT_TEMPLATES = "tokenizer.json", "chat_template.jinja", "additional_chat_templates"
GENERATION_CONFIG, MODEL_CONFIG = "generation_config.json", "config.json"
# Older folders have these settings in config.json.
GENERATION_KEYS = (
    "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "bad_words_ids",
)  # fmt: skip
MAX_CHAT_TEMPLATES = 64
VOCABULARY_FILES = {
    "vocab.txt": convert_vocabulary,
    "merges.txt": convert_vocabulary,
    "tokenizer.model": convert_sentencepiece,
    "spiece.model": convert_sentencepiece,
}


@dataclass(frozen=True)
class TokenizerFiles:
    """The contents of a tokenizer's files, as arguments of `Tokenizer`."""

    core: tokenizers.Tokenizer
    special_tokens_map: dict[str, str]
    chat_template: str | None
    stop_ids: tuple[int, ...]
    clean_up_tokenization_spaces: bool
    decoder_start: int | None = None
    generation: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class GenerationConfig:
    """The ids in `generation_config.json` with which an encoder-decoder generates, as in transformers.

    A folder without that file has them in `config.json`. Beam search, length penalties and n-gram bans are not applied.
    """

    decoder_start_token_id: int | None = None
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | None = None
    suppress_tokens: tuple[int, ...] = ()  # with all `bad_words_ids` of one token

    @classmethod
    def load(cls, folder: Path) -> "GenerationConfig":
        file = folder / (GENERATION_CONFIG if (folder / GENERATION_CONFIG).is_file() else MODEL_CONFIG)
        keys = ("decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id")
        single = [next(iter(_read_ids(file, key)), None) for key in keys]
        words = read_json(file).get("bad_words_ids")
        words = words if isinstance(words, list) else []
        ends = [[id] for id in _read_ids(file, "eos_token_id")]  # transformers never bans these
        banned = [word[0] for word in words if isinstance(word, list) and len(word) == 1 and word not in ends]
        if not all(type(id) is int and id >= 0 for id in banned):
            raise ValueError(f"{file}: bad_words_ids={words!r:.80}; expected a list of lists of ids")
        return cls(*single, (*_read_ids(file, "suppress_tokens"), *banned))


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder or GGUF file has a tokenizer."""
    return folder.suffix == ".gguf" or any((folder / name).is_file() for name in (TOKENIZER, *VOCABULARY_FILES))


def read_folder(folder: Path) -> TokenizerFiles:
    config, model_config = read_tokenizer_config(folder), read_json(folder / MODEL_CONFIG)
    core, defaults = _read_core(folder, config, model_config)
    if not core.get_vocab_size(with_added_tokens=True):
        raise ValueError(f"{folder}: the vocabulary is empty; download or save the tokenizer again")
    core.no_truncation()  # some files keep these training settings; a prompt must not be cut or padded silently
    core.no_padding()
    special_tokens_map = SpecialTokens(folder, config).add_to(core, defaults, vocab=_vocab_size(model_config))
    tokens = {id: token for token, id in core.get_vocab(with_added_tokens=True).items()}
    listed = _token_ids(folder, "eos")
    stop_ids = tuple(id for id in listed if id in tokens)  # some configs list ids past the vocabulary
    for name in ("bos", "eos", "pad"):
        ids = [id for id in _token_ids(folder, name) if id in tokens]
        if ids:
            special_tokens_map.setdefault(f"{name}_token", tokens[ids[0]])
    # like transformers, which ignores this setting for byte-pair encoding
    clean_up = config.get("clean_up_tokenization_spaces") is True and not isinstance(core.model, models.BPE)
    template, starts = _read_chat_template(folder, config), _token_ids(folder, "decoder_start")
    generation = read_json(folder / GENERATION_CONFIG) or {
        key: model_config[key] for key in GENERATION_KEYS if model_config.get(key) is not None
    }
    return TokenizerFiles(core, special_tokens_map, template, stop_ids, clean_up, next(iter(starts), None), generation)


def _read_core(folder: Path, config: dict[str, Any], model_config: dict[str, Any]) -> Converted:
    path = folder / TOKENIZER
    if path.is_file():
        with library_errors(f"{path} is damaged or not a tokenizer file; download or save it again"):
            return tokenizers.Tokenizer.from_str(read_text(path)), {}
    for name, convert in VOCABULARY_FILES.items():
        if (folder / name).is_file():
            return convert(folder / name, config, model_config)
    raise FileNotFoundError(f"{path} is missing; a folder needs it, or one of {', '.join(VOCABULARY_FILES)}")


def _vocab_size(model_config: dict[str, Any]) -> int:
    text_config = model_config.get("text_config")
    nested = isinstance(text_config, dict) and "vocab_size" not in model_config
    size = (text_config if nested else model_config).get("vocab_size")
    return size if type(size) is int else 0


def _token_ids(folder: Path, name: str) -> tuple[int, ...]:
    """`{name}_token_id` in the first of the model's configuration files that has it."""
    files = (folder / GENERATION_CONFIG, folder / MODEL_CONFIG)
    return next((ids for file in files if (ids := _read_ids(file, f"{name}_token_id"))), ())


def _read_ids(file: Path, key: str) -> tuple[int, ...]:
    """A key of a configuration file: an id, a list of ids, or absent."""
    value = read_json(file).get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(id) is int and id >= 0 for id in ids):
        raise ValueError(f"{file}: {key}={value!r:.80}; expected an id or a list of ids")
    return tuple(ids)


def _read_chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """The template in a file, else in `tokenizer_config.json`; of several, the one named `default`."""
    files = {"default": folder / CHAT_TEMPLATE} if (folder / CHAT_TEMPLATE).is_file() else {}
    files |= {file.stem: file for file in list((folder / MORE_CHAT_TEMPLATES).glob("*.jinja"))[:MAX_CHAT_TEMPLATES]}
    if files:
        return read_text(files["default"]) if "default" in files else None
    template = config.get("chat_template")
    if isinstance(template, list) and all(isinstance(entry, dict) for entry in template):
        template = next((entry.get("template") for entry in template if entry.get("name") == "default"), None)
    if template is not None and not isinstance(template, str):
        raise ValueError(
            f"{folder / TOKENIZER_CONFIG}: chat_template is {type(template).__name__}; expected a string, or a list of "
            "objects with `name` and `template`"
        )
    return template
