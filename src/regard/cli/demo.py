"""`regard demo`: train a small model in minutes, question it, leave a report."""

from pathlib import Path
from typing import Annotated

import typer


def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="The run's directory.")] = Path("runs/demo"),
    steps: Annotated[
        int | None, typer.Option(min=1, help="Train for fewer or more steps than the recipe says.")
    ] = None,
    questions: Annotated[int | None, typer.Option(min=1, help="Held-out questions to ask; 500 by default.")] = None,
) -> None:
    """Train a small model, question it, leave a report.

    It reads stories of a small world for a few minutes and is then asked about stories it has never seen.

    \b
    Example:
      regard demo && regard chat runs/demo --temperature 0
    """
    from regard.cli.demonstration import demonstrate

    raise typer.Exit(demonstrate(out, steps, questions))
