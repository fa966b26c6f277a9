"""A recipe: everything that a training run is made from, in one TOML file.

    [data]       where the text comes from, and how it is cut into batches
    [tokenizer]  how text becomes ids
    [model]      the spec; its vocab may be left out, then it is the tokenizer's
    [train]      steps, rates, schedule (config.py)

Values can be overridden by dotted names (`train.lr=3e-4`, `model.layers.0.times=6`). What was resolved is kept with
the run.
"""

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

from regard.data import sources
from regard.data.batch import Batch
from regard.data.loader import Loader
from regard.data.sources import DataSource, Document, ShuffledSource
from regard.data.world import SPLITS
from regard.models.decoder import Decoder
from regard.spec import Spec, SpecError, nearest, read, require
from regard.text import train as tokenizers
from regard.text.tokenizer import Tokenizer
from regard.training.config import Training

RECIPES = Path(__file__).parents[1] / "recipes"


@dataclass(frozen=True)
class Data(Spec):
    source: Literal["world", "pydoc", "text", "folder", "jsonl"] = "world"
    path: str | None = None  # of text, folder and jsonl
    level: int = 1  # of the world
    rows: int = 16  # of a batch
    length: int = 256  # tokens in a row
    held_out: int = 8  # batches in an evaluation
    seed: int = 0

    def check(self) -> None:
        needs_path = self.source in ("text", "folder", "jsonl")
        require(not needs_path or self.path is not None, f"data: source={self.source!r} needs a path")
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
    size: int = 512  # of bpe, special tokens and bytes included
    documents: int = 2000  # that bpe is learned from, and character where documents have no end
    path: str | None = None  # of folder, a tokenizer.json in it

    def check(self) -> None:
        require(self.by != "folder" or self.path is not None, "tokenizer: by='folder' needs a path")
        require(self.documents > 0, f"tokenizer: documents={self.documents} must be positive")

    @property
    def expected(self) -> int:
        """How many tokens there will be, as far as can be said without reading the data (bpe may find fewer)."""
        require(self.by != "character", "tokenizer: by='character' counts what is in the data; give model.vocab a size")
        if self.by == "bpe":
            return self.size
        return (tokenizers.byte() if self.by == "byte" else Tokenizer.load(self.path or "")).vocab_size

    def make(self, data: Data) -> Tokenizer:
        if self.by == "byte":
            return tokenizers.byte()
        if self.by == "folder":
            return Tokenizer.load(self.path or "")
        if self.by == "bpe":
            return tokenizers.bpe(texts(map(data.open().document, range(self.documents))), self.size)
        splits = map(data.open, SPLITS)  # a character that is only held out must be known too
        documents = (
            split.documents if isinstance(split, ShuffledSource) else map(split.document, range(self.documents))
            for split in splits
        )
        return tokenizers.character(texts(chain.from_iterable(documents)))


def texts(documents: Iterable[Document]) -> Iterator[str]:
    return (span.text for document in documents for span in document if not span.special)


@dataclass(frozen=True)
class Recipe(Spec):
    model: Decoder
    train: Training
    data: Data = Data()
    tokenizer: Vocabulary = Vocabulary()


def find_recipe(name: str | Path) -> Path:
    """A path, or the name of a recipe that comes with the package."""
    path, own = Path(name), RECIPES / f"{name}.toml"
    if path.is_file() or not own.is_file():
        names = [recipe.stem for recipe in RECIPES.glob("*.toml")]
        require(path.is_file(), f"there is no recipe {name}; give a TOML file, or a name: {nearest(str(name), names)}")
        return path
    return own


def read_recipe(path: Path, overrides: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The plain tables of a recipe, with the overrides in their places."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{path} is not TOML: {error}") from error
    return override(tables, overrides or {})


def resolve(tables: Mapping[str, Any], tokenizer: Tokenizer | None = None) -> tuple[Recipe, Tokenizer]:
    """Tables to a checked recipe and its tokenizer, which is made unless it is given."""
    for key in tables:
        require(
            key in ("kind", *Recipe.__annotations__),
            f"a recipe has no table {key!r}; {nearest(key, Recipe.__annotations__)}",
        )
    data = read(tables.get("data", {}), "data", Data)
    vocabulary = read(tables.get("tokenizer", {}), "tokenizer", Vocabulary)
    assert isinstance(data, Data) and isinstance(vocabulary, Vocabulary)
    tokenizer = tokenizer or vocabulary.make(data)
    model = {"vocab": tokenizer.vocab_size, **tables.get("model", {})}
    recipe = Recipe.from_dict({**tables, "model": model})
    require(
        recipe.model.vocab >= tokenizer.vocab_size,
        f"model.vocab={recipe.model.vocab} is smaller than the tokenizer's {tokenizer.vocab_size}; leave it out",
    )
    context = recipe.model.context
    require(
        context is None or recipe.data.length <= context,
        f"data.length={recipe.data.length} is longer than model.context={context}; shorten the rows or widen it",
    )
    return recipe, tokenizer


def override(tables: Mapping[str, Any], values: Mapping[str, str]) -> dict[str, Any]:
    """Put values at dotted names; a number steps into a list. Values are TOML, and what is no TOML is a string."""
    tables = deepcopy(dict(tables))
    for name, value in values.items():
        *path, last = name.split(".")
        place: Any = tables
        for step in path:
            place = place[index(place, step, name)] if isinstance(place, list) else place.setdefault(step, {})
            require(isinstance(place, dict | list), f"--{name}: {step} holds a single value, nothing is inside it")
        place[index(place, last, name) if isinstance(place, list) else last] = literal(value)
    return tables


def index(items: list, step: str, name: str) -> int:
    require(
        step.isdigit() and int(step) < len(items),
        f"--{name}: {step!r} is no place in a list of {len(items)}; count from 0",
    )
    return int(step)


def literal(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def dotted(arguments: Iterable[str]) -> dict[str, str]:
    """`--train.lr=3e-4 --data.level 2` as {name: value}."""
    found: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        require(word.startswith("--") and "." in name, f"unexpected {word!r}; overrides look like --train.lr=3e-4")
        require(bool(equals or rest), f"{word} has no value; overrides look like --train.lr=3e-4")
        found[name] = value if equals else rest.pop(0)
    return found
