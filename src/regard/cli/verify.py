"""`regard verify`: check on any model that cached = whole, batched = alone, packed = separate …"""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.open_model import DeviceOption, PatternOption

if TYPE_CHECKING:
    from torch import nn

    from regard.verification.report import Report

COLOURS = {"pass": "green", "refused, as expected": "yellow", "not applicable": "dim", "FAIL": "bold red"}


def verify(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A run, a model folder, a GGUF file, an installed model, a recipe, or a spec (TOML, JSON).",
        ),
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
    report = verify_with_progress(load_or_build(model, context.args, pattern, seed, device), length, seed)
    if as_json:
        print(json.dumps({"model": model} | report.to_dict(), indent=2))
    else:
        print_report(f"laws of {model}, sequences of {report.length} tokens", report)
    raise typer.Exit(int(not report.ok))


def load_or_build(name: str, overrides: list[str], pattern: str | None, seed: int, device: str) -> "nn.Module":
    """A stored model with its weights, or the model of a spec with random weights."""
    from regard.cli.open_model import has_weights, read_spec
    from regard.verification.report import as_module

    if not has_weights(name):
        return as_module(read_spec(name, overrides, pattern), seed, device)
    if overrides or pattern is not None:
        option = [*overrides, "--pattern"][0]
        raise ValueError(f"{name} has weights, so {option} cannot change it; give a recipe or a spec instead")
    return as_module(name, seed, device)


def verify_with_progress(model: "nn.Module", length: int | None, seed: int) -> "Report":
    """The report; shows a progress bar meanwhile."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from regard.verification.report import count_laws, verify

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=count_laws(model))

        def on_law(law: str, dtype: str) -> None:
            progress.update(task, advance=1, description=f"{law} ({dtype})")

        return verify(model, length, seed, on_law=on_law)


def print_report(title: str, report: "Report") -> None:
    from rich.console import Console
    from rich.text import Text

    text = Text(f"{title}\n\n{report}")
    for result, colour in COLOURS.items():
        text.highlight_words([f"  {result}  "], colour)
    Console(soft_wrap=True).print(text)
