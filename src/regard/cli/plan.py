"""`regard plan`: what a model costs before it is built."""

import json
from typing import Annotated

import typer


def plan(
    context_: typer.Context,
    model: Annotated[
        str, typer.Argument(help="A recipe (by name or file), a spec (TOML, JSON), a model folder, or a run.")
    ],
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a text; by default the model's context.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Texts at a time.")] = 1,
    dtype: Annotated[str, typer.Option(help="Of weights and cache: float32, bfloat16, float16, float64.")] = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Count parameters, FLOPs and bytes of a model.

    Nothing is built or loaded, so any size can be planned.

    \b
    Examples:
      regard plan demo --model.width=1024
      regard plan runs/demo --context 4096 --batch 16 --dtype bfloat16 --json
    """
    from rich.console import Console
    from rich.table import Table

    from regard.cli.model import read_spec
    from regard.plan import plan as count

    numbers = count(read_spec(model, context_.args), context, batch, dtype)
    if as_json:
        print(json.dumps(numbers.to_dict(), indent=2))
        return
    table = Table("", "quantity", "amount", title=f"plan of {model}", title_justify="left")
    table.columns[2].justify = "right"
    last = None
    for group, quantity, amount in numbers.table():
        table.add_row(group if group != last else "", quantity, amount, end_section=False)
        last = group
    Console().print(table)
