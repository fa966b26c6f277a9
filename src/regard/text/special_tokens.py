"""The special tokens of a Hugging Face folder: their names, ids and matching flags.

`tokenizer_config.json` names them (`eos_token`), and its `added_tokens_decoder` lists them with their ids. Folders
without that list were written by older versions; they have `special_tokens_map.json` and `added_tokens.json`. Tokens
are added in the order of `transformers`, so that each one gets the same id.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from regard.text.untrusted_input import read_json

TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP, ADDED_TOKENS = "special_tokens_map.json", "added_tokens.json"  # of older versions
DECODER = "added_tokens_decoder"
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
MAX_ID = 1_000_000


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """`tokenizer_config.json`, with the entries of `special_tokens_map.json` in folders of older versions."""
    config = read_json(folder / TOKENIZER_CONFIG)
    return config if DECODER in config else config | read_json(folder / SPECIAL_TOKENS_MAP)


class SpecialTokens:
    """`named`: tokens by name (`eos_token`); `unnamed`: additional ones; `by_id`: those with an id in the folder."""

    def __init__(self, folder: Path, config: Mapping[str, Any]):
        self.file = folder / TOKENIZER_CONFIG
        self.has_decoder = DECODER in config
        entries = config.get(DECODER, {})
        if not isinstance(entries, dict):
            raise ValueError(f"{self.file}: {DECODER} is {entries!r:.80}; expected an object that maps ids to tokens")
        self.by_id = {_parse_id(id, self.file): _parse_token(entry, self.file) for id, entry in entries.items()}
        extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
        if not isinstance(extra, list | dict):
            raise ValueError(f"{self.file}: extra_special_tokens is {extra!r:.80}; expected a list or an object")
        others = {name: entry for name, entry in config.items() if name.endswith("_token") and isinstance(entry, str)}
        named = {name: config.get(name) for name in NAMES} | others | (extra if isinstance(extra, dict) else {})
        self.named = {name: _parse_token(entry, self.file, True) for name, entry in named.items() if entry}
        self.unnamed = [_parse_token(entry, self.file, True) for entry in extra] if isinstance(extra, list) else []
        if not self.has_decoder:
            standard = [token for name, token in self.named.items() if name in NAMES]
            special = {token.content for token in (*standard, *self.unnamed)}
            for content, id in read_json(folder / ADDED_TOKENS).items():
                entry = {"content": content, "special": content in special, "normalized": content not in special}
                self.by_id[_parse_id(id, folder / ADDED_TOKENS)] = _parse_token(entry, folder / ADDED_TOKENS)

    def add_to(self, core: tokenizers.Tokenizer, defaults: Mapping[str, str], vocab: int) -> dict[str, str]:
        """Add the tokens to `core`; returns the special tokens map, names to tokens.

        `defaults` are the special tokens of the tokenizer's class, used if the vocabulary has them and the folder does
        not name others. `vocab` is the number of the model's embeddings: a token without one is refused.
        """
        added = core.get_added_tokens_decoder()
        by_id = self.by_id if self.has_decoder else self.by_id | added
        known = {token.content: token for token in by_id.values()}
        usable = {name: AddedToken(piece) for name, piece in defaults.items() if core.token_to_id(piece) is not None}
        named = {name: token for name in NAMES if (token := (usable | self.named).get(name))} | self.named
        named = {name: known.get(token.content, token) for name, token in named.items()}
        for token in named.values():
            token.special = True
        listed = {token.content for token in (*added.values(), *by_id.values())}
        unlisted = {token.content: token for token in (*named.values(), *self.unnamed) if token.content not in listed}
        size = core.get_vocab_size(with_added_tokens=True)
        new = [content for content in unlisted if core.token_to_id(content) is None]
        if new and size + len(new) > vocab:
            raise ValueError(
                f"{self.file}: {new[0]!r} is not in the vocabulary, and the model has no embedding for it; use the "
                "tokenizer that was saved with the model"
            )
        core.add_tokens([*(token for _, token in sorted(by_id.items())), *unlisted.values()])
        for id, token in by_id.items():
            if core.token_to_id(token.content) != id:
                raise ValueError(
                    f"{self.file}: {token.content!r} is listed with id {id}, but has the id "
                    f"{core.token_to_id(token.content)} in the vocabulary; use files that were saved together"
                )
        return {name: token.content for name, token in named.items()}


def _parse_id(value: Any, file: Path) -> int:
    id = int(value) if isinstance(value, str) and value.isdecimal() and len(value) < 9 else value
    if type(id) is not int or not 0 <= id < MAX_ID:
        raise ValueError(f"{file}: an added token has the id {value!r:.40}; expected an integer from 0 to {MAX_ID - 1}")
    return id


def _parse_token(entry: Any, file: Path, special: bool = False) -> AddedToken:
    """A token in either form: "<s>" or {"content": "<s>", "lstrip": false, …}."""
    entry = {"content": entry} if isinstance(entry, str) else entry
    content = entry.get("content") if isinstance(entry, dict) else None
    if not isinstance(content, str) or not content:
        raise ValueError(f"{file}: a special token is {entry!r:.80}; expected a string or an object with `content`")
    flags = {flag: entry[flag] for flag in FLAGS if flag in entry}
    if not all(isinstance(value, bool) for value in flags.values()):
        raise ValueError(f"{file}: the special token {content!r} has the flags {flags}; each must be true or false")
    return AddedToken(content, **({"special": special} | flags))
