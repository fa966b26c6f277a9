"""Prepare the data of a recipe: tokenize all examples once, and write the recipe that trains on the result.

    recipe.toml         the recipe with its data and tokenizer replaced by those of this folder
    tokenizer/
    source-0/train      the shards of the first source (data/shards.py)
    source-0/held-out

Examples, their split and their order in every epoch are those of the recipe, so training on prepared data has the same
batches. Of an endless source the given number of examples is prepared, which are then repeated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from regard.checkpoint.atomic_folder import write_file, write_folder
from regard.data.prepare import PreparationListener, prepare
from regard.data.shards import ShardedExamples
from regard.data.sources.base import DataSource, Example, Examples, Shuffled
from regard.data.sources.prepared import HELD_OUT, TRAIN, Prepared
from regard.data.tokenization import Tokenization
from regard.spec import require, toml_lines, without_defaults
from regard.training.data_settings import Vocabulary
from regard.training.recipe import Recipe, ResolvedRecipe

RECIPE, TOKENIZER = "recipe.toml", "tokenizer"
FROM_MODEL = ("model", "tokenizer", "source_family", "start")  # not written if the recipe starts from a model
HELD_OUT_PART = 10  # of an endless source, one held-out example per ten for training


@dataclass
class FirstExamples(Sequence[Example]):
    """The first examples of an endless source. Every process opens the source itself."""

    source: DataSource
    seed: int
    split: str
    length: int

    @cached_property
    def examples(self) -> Examples:
        train, held_out = self.source.open(self.seed)
        examples = held_out if self.split == HELD_OUT else train
        assert examples is not None
        return examples

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        return self.examples.example(index)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "examples"}


def prepare_recipe(
    resolved: ResolvedRecipe,
    out: Path,
    processes: int = 1,
    examples: int | None = None,
    listener: PreparationListener | None = None,
    head: Mapping[str, Any] | None = None,
) -> list[ShardedExamples]:
    """Prepare the data of a recipe in a folder; returns the shards of each source and split.

    examples: of endless sources. head: the table [head] of the recipe, if it has one. The same call continues after an
    interruption.
    """
    recipe, tokenizer, _ = resolved
    data, objective = recipe.data, recipe.objective
    assert objective is not None, "a resolved recipe has an objective"
    refuse_other_files(out)
    tokenization = Tokenization(objective, tokenizer)
    with write_folder(out / TOKENIZER) as folder:
        tokenizer.save(folder)
    written = []
    sources = []
    for number, source in enumerate(data.sources):
        require(not isinstance(source, Prepared), f"data: {source.kind} is prepared already; use the original recipe")
        splits = source.open(data.seed, data.held_out > 0)
        folder = out / f"source-{number}"
        for name, split in ((TRAIN, splits.train), (HELD_OUT, splits.held_out)):
            if split is None:
                continue
            collection = collect(source, data.seed, name, split, examples)
            fingerprints = {"source": split.fingerprint, **tokenization.fingerprints()}
            written.append(
                prepare(
                    collection, tokenization, folder / name, fingerprints,
                    processes=processes, listener=listener or PreparationListener(),
                )
            )  # fmt: skip
        sources.append(Prepared(path=str(folder.absolute()), weight=source.weight))
    prepared = replace(
        recipe,
        data=replace(data, sources=tuple(sources)),
        tokenizer=Vocabulary(by="folder", path=str((out / TOKENIZER).absolute())),
    )
    lines = toml_lines(recipe_tables(prepared, head))
    write_file(out / RECIPE, ("\n".join(lines) + "\n").encode())
    return written


def recipe_tables(recipe: Recipe, head: Mapping[str, Any] | None) -> dict[str, Any]:
    """The tables of a resolved recipe as a user would write them: with `from`, model and tokenizer are that model's."""
    tables = without_defaults(recipe)
    if recipe.start is None:
        return tables
    tables = {key: value for key, value in tables.items() if key not in FROM_MODEL}
    return {
        "kind": tables.pop("kind"),
        "from": recipe.start,
        **tables,
        **({} if head is None else {"head": dict(head)}),
    }


def collect(source: DataSource, seed: int, name: str, split: Examples, examples: int | None) -> Sequence[Example]:
    """The examples of a split in the order of their collection."""
    if isinstance(split, Shuffled):
        return split.collection
    require(
        examples is not None, f"{split.name} is endless; choose the number of examples to prepare, for example 100000"
    )
    assert examples is not None
    count = examples if name == TRAIN else max(1, examples // HELD_OUT_PART)
    return FirstExamples(source, seed, name, count)


def refuse_other_files(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; choose another folder")
    known = (RECIPE, TOKENIZER)
    for entry in out.iterdir() if out.exists() else ():
        if not entry.name.startswith((".", "source-")) and entry.name not in known:
            raise ValueError(f"{out} has {entry.name}, which regard data prepare did not write; use a new folder")
