"""Strings to token ids and back: a thin wrapper over the `tokenizers` library for Hugging Face folders and GGUF files.

Special tokens (`<|end|>`, `<|user|>` …) are parsed from a string only with `special=True`. Otherwise a special token
that a user typed, or that occurs in a document, is encoded as its characters.
"""

import json
import re
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from regard.find_model import locate
from regard.text.gguf import read_gguf
from regard.text.special_tokens import TOKENIZER_CONFIG
from regard.text.tokenizer_folder import CHAT_TEMPLATE, GENERATION_CONFIG, TOKENIZER, read_folder
from regard.text.untrusted_input import library_error, library_errors

SURROGATE = re.compile("[\ud800-\udfff]")
CLEAN_UP = {f" {end}": end for end in (".", "?", "!", ",")}
CLEAN_UP |= {" ' ": "'"} | {f" {end}": end for end in ("n't", "'m", "'s", "'ve", "'re")}


def clean_up_tokenization(text: str) -> str:
    """Remove the spaces that WordPiece decoding leaves before punctuation and contractions, as `transformers` does."""
    for spaced, attached in CLEAN_UP.items():
        text = text.replace(spaced, attached)
    return text


class Encoded(NamedTuple):
    """The tokens of one or two sequences with the special tokens that the post-processor adds, as in [CLS] … [SEP]."""

    ids: list[int]
    types: list[int]  # 0 or 1, as BERT counts the special tokens
    sequences: list[int]  # 0 or 1, -1 for special tokens
    words: list[int]  # of encode_words: the index of each token's word, -1 for special tokens


class Tokenizer:
    """`bos`, `eos` and `pad` are ids or None; `stop_ids` are all ids that end a generation, eos first.

    `decoder_start` is the id that starts the output of an encoder-decoder, or None. `special_tokens_map` maps names to
    special tokens (`cls_token`), as in `transformers`. `generation` are the contents of `generation_config.json`, which
    are saved with the tokenizer, so that a model that is trained further keeps them.
    """

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        bos: str | None = None,
        eos: str | None = None,
        pad: str | None = None,
        chat_template: str | None = None,
        stop_ids: tuple[int, ...] = (),
        special_tokens_map: Mapping[str, str] | None = None,
        clean_up_tokenization_spaces: bool = False,
        decoder_start: int | None = None,
        generation: Mapping[str, Any] | None = None,
    ):
        self.core = core
        self.bos, self.eos, self.pad = (self._id(token) for token in (bos, eos, pad))
        named = {"bos_token": bos, "eos_token": eos, "pad_token": pad}
        self.special_tokens_map = dict(special_tokens_map or {})
        self.special_tokens_map |= {name: token for name, token in named.items() if token is not None}
        self.chat_template = chat_template
        self.stop_ids = tuple(dict.fromkeys((*(() if self.eos is None else (self.eos,)), *stop_ids)))
        self.clean_up_tokenization_spaces = clean_up_tokenization_spaces
        self.decoder_start = decoder_start
        self.generation = dict(generation or {})
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Ids of a string, without bos or eos. With `special`, special tokens in the string become their ids."""
        ids = self._encode(text, special, post_process=False).ids
        if special or self._special_ids.keys().isdisjoint(ids):
            return ids
        return [part for parts in self._as_characters(ids, text) for part in parts]

    def encode_with_starts(self, text: str) -> tuple[list[int], list[int]]:
        """The ids of `encode(text)`, and for each the index of its first character in the text."""
        encoding = self._encode(text, special=False, post_process=False, offsets=True)
        parts = self._as_characters(encoding.ids, text)
        starts = [start for (start, _), ids in zip(encoding.offsets, parts, strict=True) for _ in ids]
        return [id for ids in parts for id in ids], starts

    def encode_with_special_tokens(self, text: str, pair: str | None = None, special: bool = False) -> list[int]:
        """Ids of a string or a pair with the special tokens that the post-processor adds, as in [CLS] … [SEP]."""
        return self._encode(text if pair is None else (text, pair), special, post_process=True).ids

    def token_type_ids(self, text: str, pair: str) -> list[int]:
        """For each id of `encode_with_special_tokens(text, pair)`, 0 if it belongs to `text` and 1 to `pair` (BERT)."""
        return self.encode_sequences(text, pair).types

    def encode_sequences(self, text: str, pair: str | None = None) -> Encoded:
        return self._encoded(self._encode(text if pair is None else (text, pair), special=False, post_process=True))

    def encode_words(self, words: Sequence[str]) -> Encoded:
        """A text that is split into words."""
        return self._encoded(self._encode(list(words), special=False, post_process=True))

    def _encoded(self, encoding: tokenizers.Encoding) -> Encoded:
        sequences = [-1 if side is None else side for side in encoding.sequence_ids]
        types = encoding.type_ids if self.core.post_processor else [max(0, side) for side in sequences]
        return Encoded(encoding.ids, types, sequences, [-1 if word is None else word for word in encoding.word_ids])

    def decode(self, ids: list[int], special: bool = False, clean_up: bool = True) -> str:
        """The text of ids, without special tokens unless `special`.

        `clean_up=False` skips the clean-up of tokenization spaces, which otherwise applies if the tokenizer sets it.
        """
        try:
            text = self.core.decode(ids, skip_special_tokens=not special)
        except BaseException as error:  # a Rust panic is not an Exception
            raise library_error(error, "these ids cannot be decoded with this vocabulary") from error
        return clean_up_tokenization(text) if clean_up and self.clean_up_tokenization_spaces else text

    def decode_token(self, id: int) -> str:
        """A readable string for one id: its text, or its name in the vocabulary if it is only part of a character."""
        text = self.decode([id], special=True)
        return self.core.id_to_token(id) or "" if not text or "\ufffd" in text else text

    def single_id(self, text: str) -> int:
        """The id of a text that is one token; ValueError if it has several, or none."""
        ids = self.encode(text, special=True)
        if len(ids) != 1:
            parts = ", ".join(repr(self.decode_token(id)) for id in ids) or "none"
            raise ValueError(f"{text!r} is not one token (tokens: {parts}); give one, often with a space before it")
        return ids[0]

    @cached_property
    def prefix_ids(self) -> tuple[int, ...]:
        """The ids that the post-processor adds before every string, such as <s>; often none."""
        if not self._encode("", special=False, post_process=True).ids:
            return ()
        encoding = self._encode(self.sample_text, special=False, post_process=True)
        special = zip(encoding.ids, encoding.special_tokens_mask, strict=True)
        return tuple(id for id, _ in takewhile(lambda pair: pair[1], special))

    @property
    def start_id(self) -> int | None:
        """The id before the first token of a text, if the post-processor adds none: that of bos, or else of eos."""
        return self.eos if self.bos is None else self.bos

    @cached_property
    def suffix_ids(self) -> tuple[int, ...]:
        """The ids that the post-processor adds after every string, such as [SEP]; often none."""
        if not self._encode("", special=False, post_process=True).ids:
            return ()
        encoding = self._encode(self.sample_text, special=False, post_process=True)
        special = list(zip(encoding.ids, encoding.special_tokens_mask, strict=True))
        return tuple(id for id, _ in takewhile(lambda pair: pair[1], reversed(special)))[::-1]

    @cached_property
    def sample_text(self) -> str:
        """A short string that this vocabulary can encode."""
        try:
            self.encode("a")
        except ValueError:  # a vocabulary of characters without it
            return next(token for token in self.core.get_vocab() if token not in self.all_special_tokens)
        return "a"

    @cached_property
    def all_special_ids(self) -> tuple[int, ...]:
        return tuple(id for id, token in self.core.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def all_special_tokens(self) -> tuple[str, ...]:
        """The tokens that `special=True` parses, longest first."""
        tokens = [token.content for token in self.core.get_added_tokens_decoder().values() if token.special]
        return tuple(sorted(tokens, key=len, reverse=True))

    @cached_property
    def max_token_length(self) -> int:
        """The number of characters of the longest token."""
        return max(map(len, self.core.get_vocab(with_added_tokens=True)))

    @cached_property
    def vocab_size(self) -> int:
        return max(self.core.get_vocab(with_added_tokens=True).values()) + 1

    def save(self, folder: str | Path) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / TOKENIZER).write_text(self.core.to_str(pretty=True), "utf-8")
        config: dict[str, object] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": self.clean_up_tokenization_spaces,
            **dict(sorted(self.special_tokens_map.items())),  # saving what was loaded gives the same file
        }
        (folder / TOKENIZER_CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")
        starts = {} if self.decoder_start is None else {"decoder_start_token_id": self.decoder_start}
        if starts or self.generation or self.stop_ids not in ((), (self.eos,)):
            stops = {"eos_token_id": list(self.stop_ids)} if self.stop_ids else {}
            generation = self.generation | starts | stops
            (folder / GENERATION_CONFIG).write_text(json.dumps(generation) + "\n", "utf-8")
        if self.chat_template is not None:
            (folder / CHAT_TEMPLATE).write_text(self.chat_template, "utf-8")

    @classmethod
    def load(cls, folder: str | Path) -> "Tokenizer":
        """The tokenizer of a Hugging Face folder, a GGUF file or an installed model (`regard.find_model`)."""
        folder = locate(folder)
        files = read_gguf(folder) if folder.suffix == ".gguf" else read_folder(folder)
        bos, eos, pad = (files.special_tokens_map.get(f"{name}_token") for name in ("bos", "eos", "pad"))
        return cls(
            files.core, bos, eos, pad, files.chat_template,
            files.stop_ids, files.special_tokens_map, files.clean_up_tokenization_spaces, files.decoder_start,
            files.generation,
        )  # fmt: skip

    def _encode(
        self,
        text: str | tuple[str, str] | list[str],
        special: bool,
        post_process: bool,
        offsets: bool = False,
    ) -> tokenizers.Encoding:
        """The encoding of a string, a pair of strings, or a list of words."""
        words = isinstance(text, list)
        # the fast one has no word ids and offsets
        encode = self.core.encode_batch if words or offsets else self.core.encode_batch_fast
        try:
            # A lock, because `encode_special_tokens` is a setting of the whole core, and a batch releases the GIL.
            with self._lock, library_errors("this text cannot be encoded"):
                self.core.encode_special_tokens = not special
                return encode([text], is_pretokenized=words, add_special_tokens=post_process)[0]
        except ValueError as error:
            whole = text if isinstance(text, str) else "".join(text)
            surrogate = SURROGATE.search(whole)
            if surrogate:
                raise ValueError(
                    f"the text has {surrogate[0]!r} at index {surrogate.start()}, an unpaired surrogate, which is not "
                    'a character; repair it with text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")'
                ) from error
            unknown = sorted(set(whole) - set(self.core.get_vocab()))[:20]
            raise ValueError(
                f"{error}: {unknown} are not in this vocabulary; train it on text that has them, or use byte or bpe"
            ) from error

    @cached_property
    def _special_ids(self) -> dict[int, str]:
        tokens, unk = self.core.get_added_tokens_decoder().items(), self.special_tokens_map.get("unk_token")
        return {id: token.content for id, token in tokens if token.special and token.content != unk}

    def _as_characters(self, ids: list[int], text: str) -> list[list[int]]:
        """One list per id. A special token that occurs in the text is replaced by the ids of its characters."""
        if self._special_ids.keys().isdisjoint(ids):
            return [[id] for id in ids]
        # special tokens that the vocabulary lists as ordinary pieces are matched in any text
        typed = {id for id, token in self._special_ids.items() if token in text}
        return [self._character_ids(id) if id in typed else [id] for id in ids]

    def _character_ids(self, id: int) -> list[int]:
        """Ids of the characters of a special token."""
        return [token.id for char in self._special_ids[id] for token in self.core.model.tokenize(char)]

    def _id(self, token: str | None) -> int | None:
        if token is None:
            return None
        id = self.core.token_to_id(token)
        if id is None:
            raise ValueError(
                f"{token!r} is not a token of this vocabulary; train the tokenizer with it, or choose another token"
            )
        return id
