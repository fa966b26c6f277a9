"""The tables [data] and [tokenizer] of a recipe: where examples come from, the size of the batches, the vocabulary.

A recipe with one source may name it on one line and set its options beside it:

    [data]                          [data]
    source = "world"                rows = 16
    level = 2
    rows = 16                       [[data.sources]]
                                    kind = "world"
                                    level = 2

A `path` alone selects the source `images` for a folder of images, else `file`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

from regard.data.loader import MOST_PARTS
from regard.data.sources.base import DataSource, Splits, first_epoch
from regard.data.sources.files import File
from regard.data.sources.images import ImageFolder, is_image_folder
from regard.data.sources.mixture import open_sources
from regard.data.sources.prepared import Prepared
from regard.data.sources.world import WorldStories
from regard.data.spans import strings_of
from regard.spec import Spec, class_of, require, suggest_name
from regard.text.tokenizer import Tokenizer
from regard.text.train import bpe, byte, character


@dataclass(frozen=True)
class Data(Spec):
    sources: tuple[DataSource, ...] = (WorldStories(),)
    rows: int = 16  # per batch
    batch_warmup: int = 0  # first batches with an eighth, a quarter, then half of the rows, for a third each
    length: int = 256  # largest number of tokens per row
    held_out: int = 8  # batches per evaluation, at most; 0: no examples are held out
    seed: int = 0
    # batches that a thread makes in advance while the model computes; null: 2 on a GPU, 0 on a CPU
    prefetch: int | None = None

    def check(self) -> None:
        require(len(self.sources) > 0, "data: sources is empty; add one, or set data.path")
        for name in ("rows", "length"):
            require(getattr(self, name) > 0, f"data: {name}={getattr(self, name)} must be positive")
        for name in ("held_out", "prefetch", "batch_warmup", "seed"):
            require((getattr(self, name) or 0) >= 0, f"data: {name}={getattr(self, name)} must not be negative")

    @property
    def least_rows(self) -> int:
        """The rows of the first batches of a warm-up, of all processes together."""
        return self.rows // MOST_PARTS if self.batch_warmup else self.rows

    @property
    def prepared(self) -> bool:
        """Whether all examples are arrays already."""
        return all(isinstance(source, Prepared) for source in self.sources)

    def open(self) -> Splits:
        return open_sources(self.sources, self.seed, self.held_out > 0)


def read_data_table(table: Mapping[str, Any]) -> dict[str, Any]:
    """The table [data] with its source and the options of that source under `sources`."""
    table = dict(table)
    known = [field.name for field in dataclasses.fields(Data)]
    options = {key: table.pop(key) for key in list(table) if key not in (*known, "kind", "source")}
    source = table.pop("source", None)
    if "sources" in table:
        extra = ["source"] if source is not None else list(options)
        require(
            not extra, f"data: {', '.join(extra)} cannot be combined with data.sources; set it in one of the sources"
        )
        return table
    if source is None and not options:
        return table
    kind = source if source is not None else kind_of_path(options["path"]) if "path" in options else "world"
    chosen = dict(kind) if isinstance(kind, Mapping) else {"kind": kind}
    cls = class_of(chosen.get("kind", "world"), "data.source", DataSource)
    fields = [field.name for field in dataclasses.fields(cls)]
    for key in options:
        hint = "; leave out data.source to train on a file" if key == "path" else ""
        require(
            key in fields,
            f"data: {chosen.get('kind')} has no option {key!r}; {suggest_name(key, [*known, *fields])}{hint}",
        )
    return table | {"sources": [chosen | options]}


def kind_of_path(path: Any) -> str:
    return "images" if is_image_folder(Path(str(path))) else "file"


def with_image_size(table: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """The table [data], in which folders of images have the size and channels of the model, unless they are set."""
    input = model.get("input") if model.get("kind") == "encoder" else (model.get("image") or {}).get("input")
    if not isinstance(input, Mapping) or input.get("kind") != "patches" or not isinstance(table.get("sources"), list):
        return dict(table)
    expected = {"gray": input.get("channels", 3) == 1}
    if "image" in input:
        expected["size"] = input["image"]
    sources = [
        {**expected, **source} if isinstance(source, Mapping) and source.get("kind") == "images" else source
        for source in table["sources"]
    ]
    return {**table, "sources": sources}


def without_source(table: Mapping[str, Any]) -> dict[str, Any]:
    """The table [data] without its sources and their options."""
    known = {field.name for field in dataclasses.fields(Data)} - {"sources"}
    return {key: value for key, value in table.items() if key in known or key == "kind"}


def with_absolute_paths(data: Data) -> Data:
    """The same data from any working directory."""
    sources = (
        dataclasses.replace(source, path=str(Path(source.path).absolute()))
        if isinstance(source, File | ImageFolder | Prepared)
        else source
        for source in data.sources
    )
    return dataclasses.replace(data, sources=tuple(sources))


@dataclass(frozen=True)
class Vocabulary(Spec):
    by: Literal["byte", "character", "bpe", "folder"] = "bpe"
    size: int = 512  # vocabulary of bpe, including special tokens and bytes
    documents: int = 2000  # number of examples for training bpe, or for the characters of an endless source
    path: str | None = None  # for by="folder": a folder with a tokenizer.json
    single_digits: bool = False  # bpe: every digit is a token, so that numbers can be copied and compared by digit

    def check(self) -> None:
        require(self.by != "folder" or self.path is not None, "tokenizer: by='folder' needs a path; set tokenizer.path")
        require(
            self.by == "folder" or self.path is None,
            f"tokenizer: by={self.by!r} does not read path={self.path!r}; set tokenizer.by=folder, or remove the path",
        )
        require(
            self.by == "bpe" or not self.single_digits,
            f"tokenizer: by={self.by!r} has single digits already, or its own; remove single_digits",
        )
        require(self.documents > 0, f"tokenizer: documents={self.documents} must be positive")

    @property
    def expected_size(self) -> int:
        """The vocabulary size before any data is read; bpe may find fewer tokens."""
        require(
            self.by != "character",
            "tokenizer: the size of by='character' depends on the data and is not known here; set model.vocab",
        )
        if self.by == "bpe":
            return self.size
        return (byte() if self.by == "byte" else Tokenizer.load(self.path or "")).vocab_size

    def build(self, splits: Splits, special_tokens: Sequence[str] = ()) -> Tokenizer:
        """The tokenizer; one that is trained or built here has the given special tokens."""
        if self.by == "byte":
            return byte(special_tokens)
        if self.by == "folder":
            return Tokenizer.load(self.path or "")
        if self.by == "bpe":
            examples = islice(first_epoch(splits.train, self.documents), self.documents)
            return bpe(chain.from_iterable(map(strings_of, examples)), self.size, special_tokens, self.single_digits)
        # a character may occur only in held-out examples
        parts = [first_epoch(split, self.documents) for split in splits if split is not None]
        return character(chain.from_iterable(map(strings_of, chain.from_iterable(parts))), special_tokens)
