"""`regard verify`: check on any model that cached = whole, batched = alone, packed = separate …"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.open_model import DeviceOption, PatternOption

if TYPE_CHECKING:
    from torch import nn

    from regard.verification.verdict import Verdict

COLOURS = {"pass": "green", "refused": "yellow", "not applicable": "dim", "FAIL": "bold red"}


def verify(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A model folder, a run, a recipe or a spec (TOML, JSON)."),
    ],
    pattern: PatternOption = None,
    length: Annotated[
        int | None,
        typer.Option(min=4, help="Tokens per sequence; by default enough for every mask to have an effect."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the token ids, and of weights if there are none.")] = 0,
    device: DeviceOption = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check that cached = whole, batched = alone, packed = separate …

    These laws hold for every model, whatever its parts. A model with weights is checked with its own, a recipe or spec
    with random ones. The bounds are 1e-9 in float64 and 1e-5 in float32. The exit code is 1 if a law does not hold.

    \b
    Examples:
      regard verify runs/demo
      regard verify llama --pattern "3*window(16), full(no_position)"
      regard verify ~/models/my-llama --length 300 --json
    """
    from regard.verification.length import ineffective_masks, sufficient_length

    module = load_or_build(model, context.args, pattern, seed, device)
    size = length or sufficient_length(module, module.spec)  # ty: ignore[invalid-argument-type]
    verdicts = check_laws(module, size, seed)
    failed = sum(verdict.result == "FAIL" for verdict in verdicts)
    if as_json:
        laws = [verdict.to_dict() for verdict in verdicts]
        print(json.dumps({"model": model, "length": size, "seed": seed, "failed": failed, "laws": laws}, indent=2))
    else:
        print_table(f"laws of {model}, sequences of {size} tokens", verdicts)
        for mask, needed in ineffective_masks(module.spec, size).items():  # ty: ignore[invalid-argument-type]
            print(f"{mask} masks nothing in sequences of {size} tokens; --length {needed} would test it")
        print(f"{failed} laws do not hold" if failed else "all laws that apply hold")
    raise typer.Exit(int(failed > 0))


def load_or_build(name: str, overrides: list[str], pattern: str | None, seed: int, device: str) -> "nn.Module":
    """A stored model with its weights, or a spec's model with wide random weights."""
    from regard.checkpoint.model_folder import load
    from regard.cli.open_model import has_weights, model_folder, read_spec
    from regard.language_model import resolve_device
    from regard.verification.draw import draw_wide

    device = resolve_device(device)
    folder = Path(name)
    if has_weights(name):
        if overrides or pattern is not None:
            option = [*overrides, "--pattern"][0]
            raise ValueError(f"{name} has weights, so {option} cannot change it; give a recipe or a spec instead")
        found = model_folder(folder)
        return load(found, device, checked=found != folder)
    module = read_spec(name, overrides, pattern).build(seed)
    draw_wide(module, seed)
    return module.to(device)


def check_laws(model: "nn.Module", length: int, seed: int) -> "list[Verdict]":
    """The verdicts; shows a progress bar meanwhile."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from regard.verification.verdict import count, verify

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=count(model))

        def on_law(law: str, dtype: str) -> None:
            progress.update(task, advance=1, description=f"{law} ({dtype})")

        return verify(model, length, seed, on_law)


def print_table(title: str, verdicts: "list[Verdict]") -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table("law", "result", "float64", "float32", "note", title=title, title_justify="left", box=SIMPLE_HEAD)
    table.columns[1].no_wrap = True
    for verdict in verdicts:
        colour = COLOURS[verdict.result]
        result = "refused, as expected" if verdict.result == "refused" else verdict.result
        columns = [f"{verdict.differences[d]:.1e}" if d in verdict.differences else "" for d in ("float64", "float32")]
        table.add_row(verdict.law, f"[{colour}]{result}[/]", *columns, verdict.note)
    Console().print(table)
