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
    from regard.training_run import resume_run, start_run

    console = Console(stderr=True)
    if (recipe is None) == (resume is None):
        raise typer.BadParameter("give either a recipe or --resume RUN")
    if resume is not None:
        if out is not None:
            raise typer.BadParameter("a run is resumed in its own directory; omit --out")
        if context.args:
            raise typer.BadParameter(f"a run is resumed with its own recipe; omit {context.args[0]}")
        if pattern is not None:
            raise typer.BadParameter("a run is resumed with its own recipe; omit --pattern")
        result = resume_run(resume, device, console)
    else:
        assert recipe is not None
        file = find_recipe(recipe)
        resolved, tokenizer = resolve(read_recipe(file, parse_overrides(context.args)), pattern=pattern)
        console.print(resolved.to_toml(), highlight=False, markup=False)
        result = start_run(out or Path("runs") / file.stem, resolved, tokenizer, device, console)
    raise typer.Exit(result.exit_code)
