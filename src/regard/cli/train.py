"""`regard train`: train a model from a recipe, fine-tune a model, or resume a run."""

from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

import typer

from regard.cli.open_model import DataOption, DeviceOption, PatternOption, RecipeArgument, StartOption, split_recipe


def train(
    context: typer.Context,
    recipe: RecipeArgument = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The run's directory; runs/NAME by default.")] = None,
    start: StartOption = None,
    data: DataOption = None,
    pattern: PatternOption = None,
    resume: Annotated[Path | None, typer.Option(help="Continue this run from its last checkpoint.")] = None,
    device: DeviceOption = "auto",
    extend: Annotated[
        bool, typer.Option("--extend", help="With --resume: accept that more steps let the learning rate jump.")
    ] = False,
    show: Annotated[
        bool, typer.Option("--show", help="Print the recipe with all its overrides and defaults, and train nothing.")
    ] = False,
) -> None:
    """Train a model from a recipe. Every value of the recipe can be overridden by its dotted name.

    \b
    Examples:
      regard train demo --out runs/mine --train.steps=500 --model.width=96
      regard train llama --data my.txt --train.steps=2000
      regard train --from smollm2 --data chats.jsonl --adapter.rank=16 --out runs/tuned
      regard train llama --pattern "3*window(64), full(no_position)"
      regard train bert --show
      regard train --resume runs/mine
      regard train --resume runs/mine --train.steps=4000 --extend
    """
    from rich.console import Console

    from regard.training.overrides import parse_overrides
    from regard.training_run import FINE_TUNE, read_tables, resume_run

    console, (recipe, overrides) = Console(stderr=True), split_recipe(recipe, context.args)
    if resume is not None and show:
        raise typer.BadParameter(f"the recipe of a run is in {resume / 'config.json'}; --show is for a new run")
    if resume is not None:
        given = {"RECIPE": recipe, "--out": out, "--from": start, "--data": data, "--pattern": pattern}
        for name, value in given.items():
            if value is not None:
                raise typer.BadParameter(f"a run is resumed with its own directory and recipe; omit {name}")
        raise typer.Exit(resume_run(resume, device, console, parse_overrides(overrides), extend).exit_code)
    if extend:
        raise typer.BadParameter("--extend is for --resume RUN --train.steps=N")
    if recipe is None and start is None:
        raise typer.BadParameter(
            "give a recipe, a model to fine-tune (--from MODEL), or a run to continue (--resume RUN)"
        )
    name, tables = read_tables(recipe, parse_overrides(overrides), start, data)
    start_training(tables, out or Path("runs") / name, device, recipe or FINE_TUNE, show, pattern)


def start_training(
    tables: dict[str, Any], path: Path, device: str, recipe: str, show: bool = False, pattern: str | None = None
) -> None:
    """Train in a new run, or only show the recipe, and exit."""
    from rich.console import Console

    from regard.training.recipe import resolve
    from regard.training.run import Run
    from regard.training_run import joins_run, resume_run, start_run

    if show:
        print(header_of(recipe) + resolve(tables, pattern=pattern).recipe.with_defaults(), end="")
        return
    console = Console(stderr=True)
    if joins_run(path):
        raise typer.Exit(resume_run(path, device, console).exit_code)
    Run(path).check_new()  # before the tokenizer is trained, which may take minutes
    raise typer.Exit(start_run(path, resolve(tables, pattern=pattern), device, console).exit_code)


def header_of(recipe: str) -> str:
    """The comment at the start of a recipe file, with an empty line after it."""
    from regard.training.recipe import find_recipe

    lines = takewhile(lambda line: line.startswith("#"), find_recipe(recipe).read_text("utf-8-sig").splitlines())
    return "".join(f"{line}\n" for line in [*lines, ""])
