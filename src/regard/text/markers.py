"""The marker tokens of a folder: which there are, what they are called, and how each is found in a text.

`tokenizer_config.json` names them (`eos_token`), and its `added_tokens_decoder` lists them with their ids. Where it has
no such list, what older versions wrote counts as well: `special_tokens_map.json` and `added_tokens.json`. The order of
asking is that of `transformers`, so that the same token ends up with the same id.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from regard.text.files import read_json

CONFIG, OLD_NAMES, OLD_IDS = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
LIST = "added_tokens_decoder"
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
MOST = 1_000_000  # ids above are not believed


def read_settings(folder: Path) -> dict[str, Any]:
    config = read_json(folder / CONFIG)
    return config if LIST in config else config | read_json(folder / OLD_NAMES)


class Markers:
    """`named`: the token of each name; `others`: those without one; `listed`: those whose id the folder tells."""

    def __init__(self, folder: Path, config: Mapping[str, Any]):
        self.file = folder / CONFIG
        self.complete = LIST in config  # else what older versions wrote counts, and the vocabulary's own list before it
        entries = config.get(LIST, {})
        if not isinstance(entries, dict):
            raise ValueError(f"{self.file}: {LIST} is {entries!r:.80}; expected an object of ids")
        self.listed = {_id(id, self.file): _token(entry, self.file) for id, entry in entries.items()}
        more = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
        if not isinstance(more, list | dict):
            raise ValueError(f"{self.file}: the special tokens without a name are {more!r:.80}; expected a list")
        own = {name: entry for name, entry in config.items() if name.endswith("_token") and isinstance(entry, str)}
        found = {name: config.get(name) for name in NAMES} | own | (more if isinstance(more, dict) else {})
        self.named = {name: _token(entry, self.file, True) for name, entry in found.items() if entry}
        self.others = [_token(entry, self.file, True) for entry in more] if isinstance(more, list) else []
        if not self.complete:
            usual = [token for name, token in self.named.items() if name in NAMES]
            special = {token.content for token in (*usual, *self.others)}
            for piece, id in read_json(folder / OLD_IDS).items():
                token = {"content": piece, "special": piece in special, "normalized": piece not in special}
                self.listed[_id(id, folder / OLD_IDS)] = _token(token, folder / OLD_IDS)

    def add(self, core: tokenizers.Tokenizer, defaults: Mapping[str, str], rows: int) -> dict[str, str]:
        """Make them tokens of `core`; return what each name stands for.

        `defaults` are the names that a kind of tokenizer gives where the folder gives none; `rows` those of the model.
        """
        own = core.get_added_tokens_decoder()
        listed = self.listed if self.complete else self.listed | own
        known = {token.content: token for token in listed.values()}
        held = {name: AddedToken(piece) for name, piece in defaults.items() if core.token_to_id(piece) is not None}
        named = {name: token for name in NAMES if (token := (held | self.named).get(name))} | self.named
        named = {name: known.get(token.content, token) for name, token in named.items()}
        for token in named.values():
            token.special = True
        present = {token.content for token in (*own.values(), *listed.values())}
        fresh = {token.content: token for token in (*named.values(), *self.others) if token.content not in present}
        size = core.get_vocab_size(with_added_tokens=True)
        new = [piece for piece in fresh if core.token_to_id(piece) is None]
        if new and size + len(new) > rows:
            raise ValueError(
                f"{self.file}: {new[0]!r} is not in the vocabulary, nor has the model a row for it; they do not belong "
                "together"
            )
        core.add_tokens([*(token for _, token in sorted(listed.items())), *fresh.values()])
        for id, token in listed.items():
            if core.token_to_id(token.content) != id:
                raise ValueError(
                    f"{self.file}: {token.content!r} is listed with id {id}, but comes out as "
                    f"{core.token_to_id(token.content)}; it does not belong to this vocabulary"
                )
        return {name: token.content for name, token in named.items()}


def _id(text: Any, file: Path) -> int:
    id = int(text) if isinstance(text, str) and text.isdecimal() and len(text) < 9 else text
    if type(id) is not int or not 0 <= id < MOST:
        raise ValueError(f"{file}: an added token has the id {text!r:.40}; expected one from 0 to {MOST}")
    return id


def _token(entry: Any, file: Path, special: bool = False) -> AddedToken:
    """Either spelling: "<s>" or {"content": "<s>", "lstrip": false, …}."""
    entry = {"content": entry} if isinstance(entry, str) else entry
    content = entry.get("content") if isinstance(entry, dict) else None
    if not isinstance(content, str) or not content:
        raise ValueError(f"{file}: a special token is {entry!r:.80}; expected a string or an object with `content`")
    flags = {flag: entry[flag] for flag in FLAGS if flag in entry}
    if not all(isinstance(value, bool) for value in flags.values()):
        raise ValueError(f"{file}: the special token {content!r} has the flags {flags}; expected true or false")
    return AddedToken(content, **({"special": special} | flags))
