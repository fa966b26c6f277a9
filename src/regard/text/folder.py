"""A tokenizer out of the files of a Hugging Face folder, of any age.

`tokenizer.json` holds the rules whole. Older folders have a bare vocabulary, to which the tokenizer's class adds the
rules: `vocab.txt`, or `vocab.json` with `merges.txt` (vocabulary.py), or a SentencePiece model (sentencepiece.py).
Markers come from the files beside it (markers.py), and the ids that end a generation from the model's own.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models

from regard.text.files import read_json, read_text
from regard.text.kinds import Made
from regard.text.library import faults
from regard.text.markers import CONFIG, Markers, read_settings
from regard.text.sentencepiece import read_pieces
from regard.text.vocabulary import read_vocabulary

TOKENIZER, TEMPLATE, TEMPLATES = "tokenizer.json", "chat_template.jinja", "additional_chat_templates"
GENERATION, MODEL = "generation_config.json", "config.json"
MOST_TEMPLATES = 64
BARE = {
    "vocab.txt": read_vocabulary,
    "merges.txt": read_vocabulary,
    "tokenizer.model": read_pieces,
    "spiece.model": read_pieces,
}


@dataclass(frozen=True)
class TokenizerFiles:
    core: tokenizers.Tokenizer
    names: dict[str, str]
    chat_template: str | None
    stops: tuple[int, ...]
    tidy: bool


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (TOKENIZER, *BARE))


def read_folder(folder: Path) -> TokenizerFiles:
    config, model = read_settings(folder), read_json(folder / MODEL)
    core, defaults = _read_core(folder, config, model)
    if not core.get_vocab_size(with_added_tokens=True):
        raise ValueError(f"{folder}: the vocabulary is empty; fetch or save the tokenizer again")
    core.no_truncation()  # files carry these settings of some training along: a prompt is not cut or padded in silence
    core.no_padding()
    names = Markers(folder, config).add(core, defaults, rows=_rows(model))
    pieces = {id: piece for piece, id in core.get_vocab(with_added_tokens=True).items()}
    stops = tuple(id for id in _ids(folder, "eos") if id in pieces)  # configs name ids past a smaller vocabulary
    for name in ("bos", "eos", "pad"):
        ids = [id for id in _ids(folder, name) if id in pieces]
        if ids:
            names.setdefault(f"{name}_token", pieces[ids[0]])
    tidy = config.get("clean_up_tokenization_spaces") is True and not isinstance(core.model, models.BPE)
    return TokenizerFiles(core, names, _read_template(folder, config), stops, tidy)


def _read_core(folder: Path, config: dict[str, Any], model: dict[str, Any]) -> Made:
    path = folder / TOKENIZER
    bare = next((name for name in BARE if (folder / name).is_file()), None)
    if not path.is_file():
        if bare is None:
            raise FileNotFoundError(f"{path} is missing; a folder needs it, or one of {', '.join(BARE)}")
        return BARE[bare](folder / bare, config, model)
    with faults(f"{path} is damaged or no tokenizer file; fetch or save it again"):
        return tokenizers.Tokenizer.from_str(read_text(path)), {}


def _rows(model: dict[str, Any]) -> int:
    inner = model.get("text_config")
    rows = (inner if isinstance(inner, dict) and "vocab_size" not in model else model).get("vocab_size")
    return rows if type(rows) is int else 0


def _ids(folder: Path, name: str) -> tuple[int, ...]:
    """`eos_token_id` of the model's own files: a number, a list of numbers, or absent."""
    key = f"{name}_token_id"
    for file in (folder / GENERATION, folder / MODEL):
        found = read_json(file).get(key)
        ids = found if isinstance(found, list) else [] if found is None else [found]
        if not all(type(id) is int and id >= 0 for id in ids):
            raise ValueError(f"{file}: {key}={found!r:.80}; expected an id or a list of ids")
        if ids:
            return tuple(ids)
    return ()


def _read_template(folder: Path, config: dict[str, Any]) -> str | None:
    """The template files, else the entry in the configuration; of several the one named `default`."""
    files = {"default": folder / TEMPLATE} if (folder / TEMPLATE).is_file() else {}
    files |= {file.stem: file for file in list((folder / TEMPLATES).glob("*.jinja"))[:MOST_TEMPLATES]}
    if files:
        return read_text(files["default"]) if "default" in files else None
    template = config.get("chat_template")
    if isinstance(template, list) and all(isinstance(entry, dict) for entry in template):
        template = next((entry.get("template") for entry in template if entry.get("name") == "default"), None)
    if template is not None and not isinstance(template, str):
        raise ValueError(
            f"{folder / CONFIG}: chat_template is {type(template).__name__}; expected text, or named texts"
        )
    return template
