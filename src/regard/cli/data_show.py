"""`regard data show`: the first batch of a recipe, token by token, and which tokens count in the loss."""

from typing import Annotated

import typer

from regard.cli.open_model import DataOption, RecipeArgument, StartOption, split_recipe


def show(
    context: typer.Context,
    recipe: RecipeArgument = None,
    start: StartOption = None,
    data: DataOption = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows to show.")] = 2,
    split: Annotated[str, typer.Option(help="train or held-out.")] = "train",
) -> None:
    """Show how the examples of a recipe become a batch: tokens, documents, positions, and what counts in the loss.

    \b
    Examples:
      regard data show demo
      regard data show --from smollm2 --data chats.jsonl
      regard data show llama --data my.txt --data.length=64 --rows 1
    """
    from rich.console import Console

    from regard.data.loader import Loader
    from regard.training.overrides import parse_overrides
    from regard.training.recipe import resolve
    from regard.training.show_batch import describe_batch
    from regard.training_run import read_tables

    if split not in ("train", "held-out"):
        raise typer.BadParameter(f"--split {split}: choose train or held-out")
    recipe, overrides = split_recipe(recipe, context.args)
    _, tables = read_tables(recipe, parse_overrides(overrides), start, data)
    resolved, tokenizer, splits = resolve(tables)
    examples = splits.train if split == "train" else splits.held_out
    if examples is None:
        raise ValueError(f"{splits.train.name} has no held-out examples; use --split train")
    assert resolved.objective is not None
    settings = resolved.data
    loader = Loader(examples, resolved.objective, tokenizer, settings.rows, settings.length, settings.seed)
    console = Console()
    count = "endless" if examples.count is None else f"{examples.count} examples"
    console.print(f"{examples.name}: {count}; objective {resolved.objective.kind}", highlight=False, markup=False)
    for line in describe_batch(next(loader), tokenizer, rows, colours=console.color_system is not None):
        console.print(line, soft_wrap=True)
