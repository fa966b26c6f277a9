"""Text to ids and back: a thin wrapper over the `tokenizers` library that reads and writes Hugging Face folders.

Marker tokens (`<|end|>`, `<|user|>` …) are read from text only when `special=True`: text that merely looks like a
marker, typed by a user or found in a file, is encoded as the characters it is.
"""

import json
import re
from collections.abc import Mapping
from functools import cached_property
from itertools import takewhile
from pathlib import Path

import tokenizers

from regard.packaged import locate
from regard.text.folder import GENERATION, TEMPLATE, TOKENIZER, read_folder
from regard.text.gguf import read_gguf
from regard.text.library import faults
from regard.text.markers import CONFIG
from regard.text.tidy import tidied

HALF = re.compile("[\ud800-\udfff]")


class Tokenizer:
    """`bos`, `eos` and `pad` are ids or None; `stops` are all ids that end a generation.

    `names` are the texts of all markers that have a name (`cls_token`); `tidy` takes spaces before punctuation out.
    """

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        bos: str | None = None,
        eos: str | None = None,
        pad: str | None = None,
        chat_template: str | None = None,
        stops: tuple[int, ...] = (),
        names: Mapping[str, str] | None = None,
        tidy: bool = False,
    ):
        self.core = core
        self.bos, self.eos, self.pad = (self._id(piece) for piece in (bos, eos, pad))
        given = {"bos_token": bos, "eos_token": eos, "pad_token": pad}
        self.names = {**(names or {}), **{name: piece for name, piece in given.items() if piece is not None}}
        self.chat_template = chat_template
        self.stops = tuple(dict.fromkeys((*(() if self.eos is None else (self.eos,)), *stops)))
        self.tidy = tidy

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Ids of a text, without bos or eos. With `special`, markers written in the text become their tokens."""
        ids = self._encoded(text, special, frame=False).ids
        if special or self._marker_ids.keys().isdisjoint(ids):
            return ids
        # a model whose vocabulary holds its markers like any piece makes them of plain text too
        typed = {id for id, marker in self._marker_ids.items() if marker in text}
        return [part for id in ids for part in (self._characters(id) if id in typed else (id,))]

    def framed(self, text: str, second: str | None = None) -> list[int]:
        """Ids of a text, or of two, with the markers that the tokenizer's own rules put around: [CLS] … [SEP]."""
        return self._encoded(text if second is None else (text, second), special=False, frame=True).ids

    def sides(self, text: str, second: str) -> list[int]:
        """For each id of the two texts framed, which of them it belongs to: 0 or 1, as BERT was taught."""
        encoding = self._encoded((text, second), special=False, frame=True)
        return encoding.type_ids if self.core.post_processor else [side or 0 for side in encoding.sequence_ids]

    def decode(self, ids: list[int], special: bool = False) -> str:
        """The text of ids; marker tokens are left out unless `special`."""
        text = self.rough(ids, special)
        return tidied(text) if self.tidy else text

    def rough(self, ids: list[int], special: bool = False) -> str:
        """The text of ids as the pieces have it, before spaces are tidied."""
        with faults("these ids are no text of this vocabulary"):
            return self.core.decode(ids, skip_special_tokens=not special)

    def _encoded(self, text: str | tuple[str, str], special: bool, frame: bool) -> tokenizers.Encoding:
        self.core.encode_special_tokens = not special
        try:
            with faults("this text cannot be encoded"):
                return self.core.encode_batch_fast([text], add_special_tokens=frame)[0]  # frees the GIL
        except ValueError as error:
            whole = text if isinstance(text, str) else "".join(text)
            half = HALF.search(whole)
            if half:
                raise ValueError(
                    f"the text holds {half[0]!r} at {half.start()}: half of a surrogate pair, which is no character; "
                    'put such text right with text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")'
                ) from error
            strange = sorted(set(whole) - set(self.core.get_vocab()))[:20]
            raise ValueError(
                f"{error}: {strange} are not in this vocabulary; train it on text that has them, or use bytes or BPE"
            ) from error

    @cached_property
    def _marker_ids(self) -> dict[int, str]:
        tokens, unknown = self.core.get_added_tokens_decoder().items(), self.names.get("unk_token")
        return {id: token.content for id, token in tokens if token.special and token.content != unknown}

    def _characters(self, marker: int) -> list[int]:
        return [token.id for char in self._marker_ids[marker] for token in self.core.model.tokenize(char)]

    def token(self, id: int) -> str:
        """A readable piece for one id: its text, or its raw name where it is only part of a character."""
        text = self.decode([id], special=True)
        return self.core.id_to_token(id) or "" if not text or "\ufffd" in text else text

    @cached_property
    def opening(self) -> tuple[int, ...]:
        """The ids that the tokenizer's own rules put before every text, such as <s>; often none."""
        if not self._encoded("", special=False, frame=True).ids:
            return ()
        probe = self._encoded("a", special=False, frame=True)
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
            "clean_up_tokenization_spaces": self.tidy,
            **self.names,
        }
        (folder / CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        if self.stops not in ((), (self.eos,)):
            ends = {"eos_token_id": list(self.stops)}
            (folder / GENERATION).write_text(json.dumps(ends) + "\n", encoding="utf-8")
        if self.chat_template is not None:
            (folder / TEMPLATE).write_text(self.chat_template, encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path) -> "Tokenizer":
        """Read a folder with `tokenizer.json` or an older vocabulary, and what is said beside it, or a GGUF file."""
        folder = locate(folder)
        found = read_gguf(folder) if folder.suffix == ".gguf" else read_folder(folder)
        bos, eos, pad = (found.names.get(f"{name}_token") for name in ("bos", "eos", "pad"))
        return cls(found.core, bos, eos, pad, found.chat_template, found.stops, found.names, found.tidy)

    def _id(self, piece: str | None) -> int | None:
        if piece is None:
            return None
        id = self.core.token_to_id(piece)
        if id is None:
            raise ValueError(
                f"{piece!r} is not a token of this vocabulary; train the tokenizer with it, or name another"
            )
        return id
