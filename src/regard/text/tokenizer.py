"""Text to ids and back: a thin wrapper over the `tokenizers` library that reads and writes Hugging Face folders.

Marker tokens (`<|end|>`, `<|user|>` …) are read from text only when `special=True`: text that merely looks like a
marker, typed by a user or found in a file, is encoded as the characters it is.
"""

import json
from functools import cached_property
from itertools import takewhile
from pathlib import Path

import tokenizers

from regard.packaged import locate

TOKENIZER, CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
GENERATION = "generation_config.json"
LARGEST_FILE = 256 << 20  # bytes; the files of the largest vocabularies have some thirty million


class Tokenizer:
    """`bos`, `eos` and `pad` are ids or None; `stops` are all ids that end a generation."""

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        bos: str | None = None,
        eos: str | None = None,
        pad: str | None = None,
        chat_template: str | None = None,
        stops: tuple[int, ...] = (),
    ):
        self.core = core
        self.bos, self.eos, self.pad = (self._id(piece) for piece in (bos, eos, pad))
        self.chat_template = chat_template
        self.stops = tuple(dict.fromkeys((*(() if self.eos is None else (self.eos,)), *stops)))

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Ids of a text, without bos or eos. With `special`, markers written in the text become their tokens."""
        self.core.encode_special_tokens = not special
        try:
            return self.core.encode_batch_fast([text], add_special_tokens=False)[0].ids  # frees the GIL
        except Exception as error:  # the library raises bare Exception where a vocabulary without `unk` lacks a piece
            strange = sorted(set(text) - set(self.core.get_vocab()))
            raise ValueError(
                f"{strange} are not in this vocabulary; train it on text that has them, or use bytes or BPE"
            ) from error

    def framed(self, text: str) -> list[int]:
        """Ids of a text with the markers that the tokenizer's own rules put around it: [CLS] … [SEP]."""
        self.core.encode_special_tokens = True
        return self.core.encode(text).ids

    def decode(self, ids: list[int], special: bool = False) -> str:
        """The text of ids; marker tokens are left out unless `special`."""
        return self.core.decode(ids, skip_special_tokens=not special)

    def token(self, id: int) -> str:
        """A readable piece for one id: its text, or its raw name where it is only part of a character."""
        text = self.decode([id], special=True)
        return self.core.id_to_token(id) or "" if not text or "\ufffd" in text else text

    @cached_property
    def opening(self) -> tuple[int, ...]:
        """The ids that the tokenizer's own rules put before every text, such as <s>; often none."""
        if not self.core.encode("").ids:
            return ()
        probe = self.core.encode("a")
        marked = zip(probe.ids, probe.special_tokens_mask, strict=True)
        return tuple(id for id, _ in takewhile(lambda pair: pair[1], marked))

    @cached_property
    def markers(self) -> tuple[str, ...]:
        """The texts that `special` reads as tokens, longest first."""
        texts = [token.content for token in self.core.get_added_tokens_decoder().values() if token.special]
        return tuple(sorted(texts, key=len, reverse=True))

    @cached_property
    def longest(self) -> int:
        """No token stands for more characters than this."""
        return max(map(len, self.core.get_vocab(with_added_tokens=True)))

    @property
    def vocab_size(self) -> int:
        return max(self.core.get_vocab(with_added_tokens=True).values()) + 1

    def save(self, folder: str | Path) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.core.save(str(folder / TOKENIZER))
        config: dict[str, object] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
        }
        for name, id in (("bos_token", self.bos), ("eos_token", self.eos), ("pad_token", self.pad)):
            if id is not None:
                config[name] = self.core.id_to_token(id)
        (folder / CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        if self.stops not in ((), (self.eos,)):
            ends = {"eos_token_id": list(self.stops)}
            (folder / GENERATION).write_text(json.dumps(ends) + "\n", encoding="utf-8")
        if self.chat_template is not None:
            (folder / TEMPLATE).write_text(self.chat_template, encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path) -> "Tokenizer":
        """Read a folder with `tokenizer.json`; markers and template come from the files beside it, if there are any.

        A GGUF file holds all of it itself.
        """
        folder = locate(folder)
        if folder.suffix == ".gguf":
            from regard.text.gguf import read_tokenizer

            return read_tokenizer(folder)
        core = _read_core(folder / TOKENIZER)
        config = _read_json(folder / CONFIG)
        pieces = {name: _piece(config.get(f"{name}_token")) for name in ("bos", "eos", "pad")}
        for name, piece in pieces.items():
            if piece is not None and core.token_to_id(piece) is None:
                raise ValueError(
                    f"{folder / CONFIG}: {name}_token {piece!r} is not in {TOKENIZER}; they do not belong together"
                )
        known = set(core.get_vocab(with_added_tokens=True).values())
        stops = tuple(id for id in _eos_ids(folder) if id in known)  # configs name ids past a smaller vocabulary
        if pieces["eos"] is None and stops:
            pieces["eos"] = core.id_to_token(stops[0])
        return cls(core, **pieces, chat_template=_read_template(folder, config), stops=stops)

    def _id(self, piece: str | None) -> int | None:
        if piece is None:
            return None
        id = self.core.token_to_id(piece)
        if id is None:
            raise ValueError(
                f"{piece!r} is not a token of this vocabulary; train the tokenizer with it, or name another"
            )
        return id


def _read_core(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; a tokenizer folder needs {TOKENIZER} (other formats are not read)")
    try:
        core = tokenizers.Tokenizer.from_str(_read(path))
    except Exception as error:  # the library raises bare Exception for whatever is wrong with the file
        raise ValueError(f"{path} is damaged or no tokenizer file ({error}); fetch or save it again") from error
    core.no_truncation()  # files carry these settings of some training along: a prompt is not cut or padded in silence
    core.no_padding()
    return core


def _read(path: Path) -> str:
    if path.stat().st_size > LARGEST_FILE:
        raise ValueError(f"{path} has {path.stat().st_size} bytes; more than {LARGEST_FILE} are not read")
    return path.read_text(encoding="utf-8")


def _read_json(path: Path) -> dict:
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); fetch or save it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds {type(value).__name__}, not a JSON object; fetch or save it again")
    return value


def _piece(token: object) -> str | None:
    """A token's text from either spelling: "<s>" or {"content": "<s>", …}."""
    if isinstance(token, dict):
        token = token.get("content")
    if token is not None and not isinstance(token, str):
        raise ValueError(f"a special token is written as {token!r}; expected a string or an object with `content`")
    return token


def _eos_ids(folder: Path) -> tuple[int, ...]:
    """`eos_token_id` of the model's own files: a number, a list of numbers, or absent."""
    for name in (GENERATION, "config.json"):
        found = _read_json(folder / name).get("eos_token_id")
        ids = found if isinstance(found, list) else [] if found is None else [found]
        if not all(type(id) is int and id >= 0 for id in ids):
            raise ValueError(f"{folder / name}: eos_token_id={found!r}; expected an id or a list of ids")
        if ids:
            return tuple(ids)
    return ()


def _read_template(folder: Path, config: dict) -> str | None:
    """The template file, else the entry in the configuration (a string, or named ones of which `default` is taken)."""
    if (folder / TEMPLATE).is_file():
        return _read(folder / TEMPLATE)
    template = config.get("chat_template")
    if isinstance(template, list) and all(isinstance(entry, dict) for entry in template):
        template = next((entry.get("template") for entry in template if entry.get("name") == "default"), None)
    if template is not None and not isinstance(template, str):
        raise ValueError(
            f"{folder / CONFIG}: chat_template is {type(template).__name__}; expected text, or named texts"
        )
    return template
