"""`regard train`: a recipe in, a run directory out."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from regard.cli.open_model import DeviceOption, Pattern


def train(
    context: typer.Context,
    recipe: Annotated[
        str | None, typer.Argument(help="A recipe by name (demo, gpt, hybrid …), or a TOML file.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The run's directory; runs/NAME by default.")] = None,
    pattern: Pattern = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with this run, exactly where it was.")] = None,
    device: DeviceOption = "auto",
) -> None:
    """Train a model as a recipe says. Anything in the recipe can be overridden by its dotted name.

    \b
    Examples:
      regard train demo --out runs/mine --train.steps=500 --model.width=96
      regard train llama --pattern "3*window(64), full(no_position)"
      regard train --resume runs/mine
    """
    from rich.console import Console

    from regard.cli.training_run import begin, go_on
    from regard.models.pattern import retile
    from regard.training.recipe import dotted, find_recipe, read_recipe, resolve

    console = Console(stderr=True)
    if (recipe is None) == (resume is None):
        raise typer.BadParameter("give either a recipe or --resume RUN")
    if resume is not None:
        if out is not None:
            raise typer.BadParameter("a run is resumed where it is; leave --out away")
        if context.args:
            raise typer.BadParameter(f"a run is resumed as it was begun; {context.args[0]} cannot change it now")
        if pattern is not None:
            raise typer.BadParameter("a run is resumed as it was begun; leave --pattern away")
        result = go_on(resume, device, console)
    else:
        assert recipe is not None
        file = find_recipe(recipe)
        resolved, tokenizer = resolve(read_recipe(file, dotted(context.args)))
        if pattern is not None:
            resolved = replace(resolved, model=retile(resolved.model, pattern))
        console.print(resolved.to_toml(), highlight=False, markup=False)
        result = begin(out or Path("runs") / file.stem, resolved, tokenizer, device, console)
    raise typer.Exit(result.exit_code)
