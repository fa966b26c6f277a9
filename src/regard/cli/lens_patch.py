"""`regard lens patch`: which layer and position carries the difference between two texts."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from regard.cli.open_inspected import encode, open_inspected
from regard.cli.open_model import DeviceOption, ModelArgument


def patch(
    model: ModelArgument,
    clean: Annotated[str, typer.Option(help="The text whose activations are patched in.")],
    corrupted: Annotated[str, typer.Option(help="A text of as many tokens, with another next token.")],
    answer: Annotated[str, typer.Option(help="The next token of the clean text.")],
    wrong: Annotated[str, typer.Option(help="The next token of the corrupted text.")],
    names: Annotated[
        str | None, typer.Option(help="The activations, such as '*.body' (see `regard lens names`).")
    ] = None,
    by: Annotated[Literal["position", "head"], typer.Option(help="Patch one position, or one head, at a time.")] = (
        "position"
    ),
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Draw a heat map into this PNG or SVG file.")] = None,
    device: DeviceOption = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object with tokens and effects.")] = False,
) -> None:
    """Run the model on a corrupted text with one activation at a time from a clean text.

    The effect is the share of logit(answer) - logit(wrong) that the patch restores: 1 is the clean run, 0 none. By
    default the residual stream is patched, after each layer and at each position.

    \b
    Examples:
      regard lens patch runs/demo --clean "Anna is in the" --corrupted "Ben is in the" --answer " barn" --wrong " shed"
      regard lens patch runs/demo --clean "Anna is" --corrupted "Ben is" --answer " in" --wrong " at" -o layers.png
      regard lens patch runs/demo --clean "Anna" --corrupted "Ben" --answer " is" --wrong " at" --names "*.z" --by head
    """
    llm = open_inspected(model, device)
    from rich.console import Console
    from rich.progress import Progress

    from regard.lens import activation_patching, logit_difference

    first, second = encode(model, llm, clean), encode(model, llm, corrupted)
    tokens = [llm.tokenizer.decode_token(id) for id in first]
    metric = logit_difference(llm.tokenizer.single_id(answer), llm.tokenizer.single_id(wrong))
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("patching", total=None)

        def update(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        found = activation_patching(llm.model, first, second, metric, names, by, update)
    cells = tokens if by == "position" else [str(head) for head in range(found.matrix.shape[1])]
    if as_json:
        effects = {name: values.tolist() for name, values in found.effects.items()}
        print(json.dumps({"tokens": tokens, "clean": found.clean, "corrupted": found.corrupted, "effects": effects}))
    elif out is not None:
        from regard.report.plots import heat_map

        heat_map(found.matrix, list(found.effects), cells, out)
        console.print(f"written: {out}")
    else:
        show(found.effects, cells)


def show(effects: dict, cells: list[str]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("activation", "largest effects")
    for name, values in effects.items():
        best = values.abs().topk(min(3, len(cells))).indices.tolist()
        row = ", ".join(f"{cells[i]!r} ({i}) {values[i].item():.2f}" for i in best)
        table.add_row(name, Text(row))  # Text: a token with brackets is not markup
    Console().print(table)
