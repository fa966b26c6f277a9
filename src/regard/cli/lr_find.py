"""`regard lr-find`: find a learning rate for a recipe by a short training with a growing rate."""

from pathlib import Path
from typing import Annotated

import typer

from regard.cli.open_model import DataOption, DeviceOption, PatternOption, RecipeArgument, StartOption, split_recipe


def lr_find(
    context: typer.Context,
    recipe: RecipeArgument = None,
    start: StartOption = None,
    data: DataOption = None,
    lowest: Annotated[float, typer.Option(help="The first rate.")] = 1e-6,
    highest: Annotated[float, typer.Option(help="The last rate.")] = 1.0,
    steps: Annotated[int, typer.Option(help="Steps from the first rate to the last.")] = 100,
    plot: Annotated[Path | None, typer.Option(help="Write a plot to this PNG file; needs matplotlib.")] = None,
    pattern: PatternOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Find a learning rate. A new model is trained for some steps with a rate that grows until the loss rises again.

    The suggested rate is the one at which the loss falls fastest, at most a tenth of that at which training diverges.

    \b
    Examples:
      regard lr-find llama
      regard lr-find demo --train.optimizer.kind=muon --plot rates.png
    """
    import math
    from dataclasses import replace
    from tempfile import TemporaryDirectory

    from rich.console import Console

    from regard.compat import resolve_device
    from regard.report.plots import pyplot, rate_sweep
    from regard.report.terminal import text_plot
    from regard.training.lr_finder import sweep_learning_rate, table_rows
    from regard.training.overrides import parse_overrides
    from regard.training.progress import Listener
    from regard.training.recipe import resolve
    from regard.training.run import Run
    from regard.training.start import build_model
    from regard.training_run import build_trainer, read_tables

    console, (recipe, overrides) = Console(highlight=False), split_recipe(recipe, context.args)
    if recipe is None and start is None:
        raise typer.BadParameter("give a recipe, or a model to fine-tune (--from MODEL)")
    if plot is not None:
        pyplot()  # a missing matplotlib is reported before the sweep
    _, tables = read_tables(recipe, parse_overrides(overrides), start, data)
    resolved, tokenizer, splits = resolve(tables, pattern=pattern)
    objective = resolved.objective
    assert objective is not None, "a resolved recipe has an objective"
    if objective.needs_rollouts or getattr(objective, "on_policy", 0):
        raise typer.BadParameter(
            f"objective {objective.kind} samples its batches from the model, and lr-find trains a copy of it; compare "
            "short runs with regard sweep --vary train.lr=1e-5,1e-4"
        )
    if objective.alternates:
        raise typer.BadParameter(
            f"the losses of objective {objective.kind} fall and rise with those of its opponent, so they do not show a "
            "rate; compare samples of short runs with several rates"
        )
    model = build_model(resolved).to(resolve_device(device))
    resolved = replace(resolved, data=replace(resolved.data, batch_warmup=0))  # the rate of full batches
    splits = splits._replace(held_out=None)
    with TemporaryDirectory() as folder, console.status("") as status:  # the directory of no run
        trainer = build_trainer(Run(folder), resolved, model, tokenizer, splits, Listener())
        sweep = sweep_learning_rate(
            trainer.model, trainer.loader, trainer.objective, trainer.settings, lowest, highest, steps,
            lambda step, rate, loss: status.update(f"step {step + 1} of {steps}, rate {rate:.2g}, loss {loss:.4g}"),
        )  # fmt: skip
    console.print("    rate   smoothed loss")
    for rate, loss in table_rows(sweep):
        console.print(f"{rate:8.1e}   {loss:.4f}")
    points = [(math.log10(rate), loss) for rate, loss in zip(sweep.rates, sweep.smoothed, strict=True)]
    marker = min(points, key=lambda point: abs(point[0] - math.log10(sweep.suggestion)))
    console.print("\n".join(["", *text_plot(points, [marker]), "loss over the power of ten of the rate", ""]))
    end = f"diverged at {sweep.diverged:.1e}" if sweep.diverged else "did not diverge"
    console.print(f"The loss falls fastest at {sweep.steepest:.1e}, and training {end}.")
    console.print(f"Suggested: --train.lr={sweep.suggestion:g}   (the recipe has {trainer.settings.lr:g})")
    if plot is not None:
        rate_sweep(sweep.rates, sweep.losses, sweep.smoothed, sweep.suggestion, plot)
        console.print(f"plot: {plot}")
