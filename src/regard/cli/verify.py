"""`regard verify`: does the model keep the laws that hold where features cross?"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.open_model import DeviceOption, Pattern

if TYPE_CHECKING:
    from torch import nn

    from regard.verify.verdict import Verdict

COLOURS = {"pass": "green", "refused": "yellow", "not applicable": "dim", "FAIL": "bold red"}


def verify(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="A model folder, a run, a recipe (by name or file), or a spec (TOML, JSON).")
    ],
    pattern: Pattern = None,
    length: Annotated[
        int | None, typer.Option(min=4, help="Tokens of a text; by default as many as masks need to be felt.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the texts, and of weights where there are none.")] = 0,
    device: DeviceOption = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Try the laws: cached = whole, batched = alone, packed = separate … on your own model.

    A checkpoint is tried with its own weights, in float64 (where only a mistake is larger than 1e-9) and in float32
    (1e-5); a recipe or spec with random ones. Exit code 1 when a law is broken.

    \b
    Examples:
      regard verify runs/demo
      regard verify llama --pattern "3*window(16), full(no_position)"
      regard verify ~/models/my-llama --length 300 --json
    """
    from regard.verify.length import enough, unfelt

    module = opened(model, context.args, pattern, seed, device)
    size = length or enough(module, module.spec)  # ty: ignore[invalid-argument-type]
    verdicts = tried(module, size, seed)
    failed = sum(verdict.result == "FAIL" for verdict in verdicts)
    if as_json:
        laws = [verdict.to_dict() for verdict in verdicts]
        print(json.dumps({"model": model, "length": size, "seed": seed, "failed": failed, "laws": laws}, indent=2))
    else:
        draw(f"laws of {model}, on texts of {size} tokens", verdicts)
        for mask, needed in unfelt(module.spec, size).items():  # ty: ignore[invalid-argument-type]
            print(f"{mask} hides nothing from texts of {size} tokens; --length {needed} would show it")
        print(f"{failed} laws are broken" if failed else "every law that applies is kept")
    raise typer.Exit(int(failed > 0))


def opened(name: str, overrides: list[str], pattern: str | None, seed: int, device: str) -> "nn.Module":
    """The model of a folder, or one with wide random weights."""
    from regard.checkpoint.model_folder import load
    from regard.cli.device import chosen
    from regard.cli.open_model import is_stored, model_folder, read_model
    from regard.verify.draw import draw_wide

    device = chosen(device)
    folder = Path(name)
    if is_stored(name):
        if overrides or pattern is not None:
            raise ValueError(f"{name} is a model as it is; {[*overrides, '--pattern'][0]} cannot change it")
        found = model_folder(folder)
        return load(found, device, checked=found != folder)
    module = read_model(name, overrides, pattern).build(seed)
    draw_wide(module, seed)
    return module.to(device)


def tried(model: "nn.Module", length: int, seed: int) -> "list[Verdict]":
    """The verdicts, with a bar while they are found."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from regard.verify.verdict import count, verify

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=count(model))

        def begun(law: str, dtype: str) -> None:
            progress.update(task, advance=1, description=f"{law} ({dtype})")

        return verify(model, length, seed, begun)


def draw(title: str, verdicts: "list[Verdict]") -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table("law", "result", "float64", "float32", "what", title=title, title_justify="left", box=SIMPLE_HEAD)
    table.columns[1].no_wrap = True
    for verdict in verdicts:
        colour = COLOURS[verdict.result]
        result = "refused, as it must" if verdict.result == "refused" else verdict.result
        columns = [f"{verdict.differences[d]:.1e}" if d in verdict.differences else "" for d in ("float64", "float32")]
        table.add_row(verdict.law, f"[{colour}]{result}[/]", *columns, verdict.note)
    Console().print(table)
