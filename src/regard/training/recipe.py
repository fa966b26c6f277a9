"""A recipe: the complete description of a training run, in one TOML file.

    [data]       the source of the documents, and the size of the batches
    [tokenizer]  the tokenizer, and how it is trained
    [model]      the spec; `vocab` is by default that of the tokenizer
    [train]      steps, learning rate, schedule, optimizer

Values can be overridden by dotted names (`train.lr=3e-4`, `model.layers.0.times=6`). The resolved recipe is saved with
the run.
"""

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

from regard.data import sources
from regard.data.batch import Batch
from regard.data.loader import Loader
from regard.data.sources import DataSource, Document, ShuffledSource
from regard.data.world import SPLITS
from regard.models.base import Scheme
from regard.models.decoder import Decoder
from regard.models.pattern import retile
from regard.spec import Spec, SpecError, require, suggest_name
from regard.text.tokenizer import Tokenizer
from regard.text.train import bpe, byte, character
from regard.training.optimizer import AdamW, Optimizer
from regard.training.schedule import Cosine, Schedule

RECIPES = Path(__file__).parents[1] / "recipes"


@dataclass(frozen=True)
class Training(Spec):
    """The settings of the training loop; every batch of the loader is one step."""

    steps: int
    lr: float = 1e-3  # the peak of the schedule
    seed: int = 0
    initialize: Scheme = "fan_in"  # the distribution of the initial weights (models/base.py)
    schedule: Schedule = Cosine(warmup=100)
    optimizer: Optimizer = AdamW()
    accumulate: int = 1  # micro-batches per step, to save memory; the loss does not change
    clip: float = 1.0  # largest norm of the gradient; 0: no clipping
    precision: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 autocast on CUDA, else float32
    compile: bool = False
    nonfinite: Literal["stop", "skip"] = "stop"  # policy for a loss or gradient that is not finite
    evaluate_every: int = 250  # steps; 0: at the end only
    save_every: int = 250  # steps; 0: at the end only
    keep: int = 2  # checkpoints; with two or more, a damaged one has a predecessor to fall back to

    def check(self) -> None:
        for name in ("steps", "accumulate", "keep"):
            require(getattr(self, name) >= 1, f"training: {name}={getattr(self, name)} must be at least 1")
        for name in ("clip", "evaluate_every", "save_every"):
            require(getattr(self, name) >= 0, f"training: {name}={getattr(self, name)} must not be negative")
        require(self.lr > 0, f"training: lr={self.lr} must be positive")


@dataclass(frozen=True)
class Data(Spec):
    source: Literal["world", "pydoc", "text", "folder", "jsonl"] = "world"
    path: str | None = None  # for the sources text, folder and jsonl
    level: int = 1  # difficulty of the stories of source="world"
    rows: int = 16  # per batch
    length: int = 256  # tokens per row
    held_out: int = 8  # batches per evaluation
    seed: int = 0

    def check(self) -> None:
        needs_path = self.source in ("text", "folder", "jsonl")
        require(not needs_path or self.path is not None, f"data: source={self.source!r} needs a path; set data.path")
        for name in ("rows", "length", "held_out"):
            require(getattr(self, name) > 0, f"data: {name}={getattr(self, name)} must be positive")

    def open(self, split: str = "train") -> DataSource:
        if self.source == "world":
            return sources.world(self.level, split, self.seed)
        if self.source == "pydoc":
            return sources.pydoc(split, self.seed)
        files = {"text": sources.text_file, "folder": sources.folder, "jsonl": sources.jsonl}
        return files[self.source](self.path or "", split, self.seed)

    def loader(self, tokenizer: Tokenizer, split: str = "train") -> Loader:
        return Loader(self.open(split), tokenizer, self.rows, self.length)

    def evaluation(self, tokenizer: Tokenizer) -> list[Batch]:
        return list(islice(self.loader(tokenizer, "held-out"), self.held_out))


@dataclass(frozen=True)
class Vocabulary(Spec):
    by: Literal["byte", "character", "bpe", "folder"] = "bpe"
    size: int = 512  # vocabulary of bpe, including special tokens and bytes
    documents: int = 2000  # number of documents for training bpe, or for the characters of an endless source
    path: str | None = None  # for by="folder": a folder with a tokenizer.json

    def check(self) -> None:
        require(self.by != "folder" or self.path is not None, "tokenizer: by='folder' needs a path; set tokenizer.path")
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

    def build(self, data: Data) -> Tokenizer:
        if self.by == "byte":
            return byte()
        if self.by == "folder":
            return Tokenizer.load(self.path or "")
        if self.by == "bpe":
            return bpe(texts(map(data.open().document, range(self.documents))), self.size)
        splits = map(data.open, SPLITS)  # a character may occur only in held-out documents
        documents = (
            split.documents if isinstance(split, ShuffledSource) else map(split.document, range(self.documents))
            for split in splits
        )
        return character(texts(chain.from_iterable(documents)))


def texts(documents: Iterable[Document]) -> Iterator[str]:
    return (span.text for document in documents for span in document if not span.special)


@dataclass(frozen=True)
class Recipe(Spec):
    model: Decoder
    train: Training
    data: Data = Data()
    tokenizer: Vocabulary = Vocabulary()


def find_recipe(name: str | Path) -> Path:
    """The path of a recipe file, or of the package's recipe of this name."""
    path, packaged = Path(name), RECIPES / f"{name}.toml"
    if path.is_file() or not packaged.is_file():
        names = [recipe.stem for recipe in RECIPES.glob("*.toml")]
        require(
            path.is_file(), f"there is no recipe {name}; use a TOML file, or a name: {suggest_name(str(name), names)}"
        )
        return path
    return packaged


def read_recipe(path: Path, overrides: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The tables of a recipe file, with the overrides applied."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{path} is not TOML: {error}") from error
    return override(tables, overrides or {})


def resolve(
    tables: Mapping[str, Any], tokenizer: Tokenizer | None = None, pattern: str | None = None
) -> tuple[Recipe, Tokenizer]:
    """The checked recipe and its tokenizer. If none is given, it is trained.

    pattern: replaces the layers of the model (models/pattern.py).
    """
    for key in tables:
        require(
            key in ("kind", *Recipe.__annotations__),
            f"a recipe has no table {key!r}; {suggest_name(key, Recipe.__annotations__)}",
        )
    draft = build_recipe(tables, 1, pattern)  # reports mistakes before the tokenizer is trained, which may take minutes
    tokenizer = tokenizer or draft.tokenizer.build(draft.data)
    recipe = build_recipe(tables, tokenizer.vocab_size, pattern)
    require(
        recipe.model.vocab >= tokenizer.vocab_size,
        f"model.vocab={recipe.model.vocab} is smaller than the tokenizer's {tokenizer.vocab_size}; leave it out",
    )
    return recipe, tokenizer


def build_recipe(tables: Mapping[str, Any], vocab: int, pattern: str | None = None) -> Recipe:
    """The checked recipe. `vocab` is used if the model's table has none."""
    model = tables.get("model", {})
    recipe = Recipe.from_dict({**tables, "model": {"vocab": vocab, **model} if isinstance(model, Mapping) else model})
    if pattern is not None:
        recipe = replace(recipe, model=retile(recipe.model, pattern))
    context = recipe.model.context
    require(
        context is None or recipe.data.length <= context,
        f"data.length={recipe.data.length} is longer than model.context={context}; lower data.length or raise the "
        "context",
    )
    return recipe


def override(tables: Mapping[str, Any], values: Mapping[str, str]) -> dict[str, Any]:
    """Set values by dotted names, in which a number is an index of a list. A value that is not TOML is a string."""
    tables = deepcopy(dict(tables))
    for name, value in values.items():
        *path, last = name.split(".")
        table: Any = tables
        for key in path:
            table = table[index(table, key, name)] if isinstance(table, list) else table.setdefault(key, {})
            require(isinstance(table, dict | list), f"--{name}: {key} is a single value, not a table")
        table[index(table, last, name) if isinstance(table, list) else last] = parse_value(value)
    return tables


def index(items: list, key: str, name: str) -> int:
    require(
        key.isdigit() and int(key) < len(items),
        f"--{name}: {key!r} is not an index of a list of {len(items)}; count from 0",
    )
    return int(key)


def parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def parse_overrides(arguments: Iterable[str]) -> dict[str, str]:
    """Arguments such as `--train.lr=3e-4 --data.level 2` as {name: value}."""
    values: dict[str, str] = {}
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        name, equals, value = argument.removeprefix("--").partition("=")
        is_override = argument.startswith("--") and "." in name
        require(is_override, f"unexpected {argument!r}; overrides look like --train.lr=3e-4")
        require(bool(equals or remaining), f"{argument} has no value; overrides look like --train.lr=3e-4")
        values[name] = value if equals else remaining.pop(0)
    return values
