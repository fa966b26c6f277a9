"""Options that several commands share, and opening the model that a command names.

A model with weights is a run, a model folder, a GGUF file or the name of an installed model. A spec without weights is
read from a recipe or a file.
"""

import json
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.find_model import find_model, known_models, locate, unknown_name

if TYPE_CHECKING:
    from rich.console import Console

    from regard.language_model import LanguageModel
    from regard.models.base import Model

ModelArgument = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL",
        help="A run, a model folder (regard or Hugging Face), a GGUF file, or a name that `regard models` lists.",
    ),
]
ContextOption = Annotated[
    int | None, typer.Option(min=2, help="Maximum tokens of prompt and answer; by default the model's context.")
]
PatternOption = Annotated[
    str | None,
    typer.Option(help='The layers in one line, instead of the recipe\'s: "3*window(256), full(no_position)".'),
]
RecipeArgument = Annotated[
    str | None, typer.Argument(metavar="RECIPE", help="The name of a recipe (demo, gpt, hybrid …), or a TOML file.")
]
StartOption = Annotated[
    str | None, typer.Option("--from", metavar="MODEL", help="Fine-tune this run, folder or packaged model.")
]
DataOption = Annotated[
    Path | None,
    typer.Option(help="A file or folder instead of the recipe's data: text, .jsonl (text, messages, labels …)."),
]
AdapterOption = Annotated[
    Path | None, typer.Option(help="A run or folder with a LoRA adapter for the model, by regard or PEFT.")
]
DeviceOption = Annotated[str, typer.Option(help="cpu, cuda, cuda:1 …; auto: a GPU if there is one.")]


def open_model(
    name: Path,
    device: str = "auto",
    context: int | None = None,
    adapter: Path | None = None,
    dtype: str = "auto",
    packed: bool = False,
) -> "LanguageModel":
    """A model that generates text."""
    find_model(name)  # before torch is imported: a mistyped name is refused at once
    from regard.engine.inputs import decoder_of
    from regard.load_model import load

    llm = load(name, device, dtype, context, adapter=adapter, packed=packed)
    decoder_of(llm.model)  # raises ValueError if there is none
    return llm


def open_chat_model(name: Path, device: str = "auto", context: int | None = None) -> "LanguageModel":
    """A model with a chat template, for one request at a time."""
    llm = open_model(name, device, context)
    if llm.tokenizer.chat_template is None:
        raise ValueError(f"{name} has no chat template, so it cannot answer messages; use a chat model")
    llm.rows = 1  # the engine reserves memory for one request
    return llm


def require_decoder(name: Path, llm: "LanguageModel") -> None:
    """Raise ValueError for an encoder-decoder, or a model that reads images."""
    from regard.models.decoder import DecoderModule

    if not isinstance(llm.model, DecoderModule):
        raise ValueError(
            f"{name} is of kind {llm.model.spec.kind}; this command needs a decoder: use `regard generate`"
        )


def model_folder(name: str | Path) -> Path:
    """The folder or GGUF file of a model; for a run, its newest complete checkpoint."""
    from regard.training.run import newest_checkpoint

    return newest_checkpoint(name)


@contextmanager
def loading_bar(console: "Console", description: str) -> Generator[Callable[[int, int], None]]:
    """A progress bar on a terminal; yields the function that updates it, `update(parameters_done, total)`."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    percentage = TextColumn("{task.percentage:3.0f}% {task.fields[rate]}")
    with Progress(
        TextColumn("{task.description}"), BarColumn(), percentage, TimeRemainingColumn(compact=True),
        console=console, transient=True, disable=not console.is_terminal,
    ) as progress:  # fmt: skip
        task = progress.add_task(description, total=None, rate="")

        def update(done: int, total: int) -> None:
            speed = progress.tasks[0].speed
            progress.update(task, completed=done, total=total, rate=f"{speed / 1e6:,.0f} M/s" if speed else "")

        yield update


def has_weights(name: str) -> bool:
    """Whether `name` is a model with weights and not a recipe or a spec."""
    path = locate(name)
    return path.is_dir() or path.suffix == ".gguf"


def read_spec(
    name: str, overrides: list[str], pattern: str | None = None, other_names: Mapping[str, Iterable[str]] | None = None
) -> "Model":
    """The spec of a model, a recipe or a file, with the layers of `pattern` if one is given.

    `other_names` are listed with the models and recipes if `name` is unknown.
    """
    from regard.models.base import Model
    from regard.models.decoder import Decoder
    from regard.models.pattern import retile
    from regard.spec import SpecError, parse_spec

    spec = parse_spec(spec_tables(name, overrides, other_names or {}), "model", Decoder)
    if not isinstance(spec, Model):
        raise SpecError(f"{name} is a spec of kind {spec.kind}, not of a model; give the spec of a whole model")
    return spec if pattern is None else retile(spec, pattern)


def spec_tables(name: str, overrides: list[str], other_names: Mapping[str, Iterable[str]]) -> "Mapping[str, Any]":
    """A model's spec as plain data."""
    from regard.checkpoint.model_folder import read_spec_and_table
    from regard.spec import parse_spec
    from regard.training.overrides import override, parse_overrides
    from regard.training.recipe import RECIPES, Vocabulary, fill_model, find_recipe, read_recipe

    if has_weights(name):
        if overrides:
            raise ValueError(f"{name} has weights, so {overrides[0]} cannot change it; override a recipe instead")
        return read_spec_and_table(model_folder(Path(name)))[0].to_dict()
    recipes = [recipe.stem for recipe in RECIPES.glob("*.toml")]
    if name not in recipes and not Path(name).exists():
        raise unknown_name(name, {**other_names, "models": known_models(), "recipes": recipes})
    path = find_recipe(name)
    if path.suffix == ".json":
        return override(json.loads(path.read_text(encoding="utf-8")), parse_overrides(overrides))
    tables = read_recipe(path, parse_overrides(overrides))
    if "from" in tables:
        return read_spec_and_table(model_folder(str(tables["from"])))[0].to_dict()
    if "model" not in tables:
        return tables
    model, head = {"kind": "decoder", **tables["model"]}, {"labels": 2}
    if fill_model(model, 1, head) == fill_model(model, 2, head):  # the vocabulary is given, or there is none
        return fill_model(model, 1, head)
    vocabulary = parse_spec(tables.get("tokenizer", {}), "tokenizer", Vocabulary)
    assert isinstance(vocabulary, Vocabulary)
    return fill_model(model, vocabulary.expected_size, head)


def split_recipe(recipe: str | None, arguments: list[str]) -> tuple[str | None, list[str]]:
    """The recipe and the overrides. With an override before the recipe, typer reads the override as the recipe."""
    overrides = list(arguments)
    if recipe is None or not recipe.startswith("--"):
        return recipe, overrides
    overrides.insert(0, recipe)
    for index, argument in enumerate(overrides):
        is_value = index > 0 and overrides[index - 1].startswith("--") and "=" not in overrides[index - 1]
        if not argument.startswith("--") and not is_value:
            return overrides.pop(index), overrides
    return None, overrides
