"""`regard train`: train a model from a recipe, or resume a run."""

from pathlib import Path
from typing import Annotated

import typer

from regard.cli.open_model import DeviceOption, PatternOption


def train(
    context: typer.Context,
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="The name of a recipe (demo, gpt, hybrid …), or a TOML file.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The run's directory; runs/NAME by default.")] = None,
    pattern: PatternOption = None,
    resume: Annotated[Path | None, typer.Option(help="Continue this run from its last checkpoint.")] = None,
    device: DeviceOption = "auto",
) -> None:
    """Train a model from a recipe. Every value of the recipe can be overridden by its dotted name.

    \b
    Examples:
      regard train demo --out runs/mine --train.steps=500 --model.width=96
      regard train llama --pattern "3*window(64), full(no_position)"
      regard train --resume runs/mine
    """
    from rich.console import Console

    from regard.training.recipe import find_recipe, parse_overrides, read_recipe, resolve
    from regard.training.run import Run
    from regard.training_run import resume_run, start_run

    console, overrides = Console(stderr=True), list(context.args)
    if recipe is not None and recipe.startswith("--"):  # an override before the recipe, or without one
        overrides.insert(0, recipe)
        recipe = None
        if resume is None:
            raise typer.BadParameter(f"the recipe comes first: regard train llama {overrides[0]}")
    if (recipe is None) == (resume is None):
        raise typer.BadParameter("give either a recipe or --resume RUN")
    if resume is not None:
        if out is not None:
            raise typer.BadParameter("a run is resumed in its own directory; omit --out")
        if overrides:
            raise typer.BadParameter(f"a run is resumed with its own recipe; omit {overrides[0]}")
        if pattern is not None:
            raise typer.BadParameter("a run is resumed with its own recipe; omit --pattern")
        result = resume_run(resume, device, console)
    else:
        assert recipe is not None
        file = find_recipe(recipe)
        path = out or Path("runs") / file.stem
        Run(path).check_new()  # before the tokenizer is trained, which may take minutes
        resolved, tokenizer = resolve(read_recipe(file, parse_overrides(overrides)), pattern=pattern)
        console.print(resolved.to_toml(), highlight=False, markup=False)
        result = start_run(path, resolved, tokenizer, device, console)
    raise typer.Exit(result.exit_code)
