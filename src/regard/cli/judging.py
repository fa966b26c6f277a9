"""What `regard compare` and `regard feedback` share: options of prompts, answers and judges, and opening a judge."""

import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated

import typer

from regard.find_model import find_model

if TYPE_CHECKING:
    from regard.feedback.judge import Judge, JudgeVerdict
    from regard.feedback.prompts import CountDone

PROMPTS = typer.Option(
    help="A file with `prompt` (a string or messages) or `messages` in each row; or world: its questions."
)
PromptsOption = Annotated[str, PROMPTS]
OptionalPromptsOption = Annotated[str | None, PROMPTS]
CountOption = Annotated[
    int | None, typer.Option(min=1, help="Only the first prompts, this many; of the world 200 by default.")
]
MaxNewOption = Annotated[int, typer.Option(min=1, help="At most this many tokens per answer.")]
TemperatureOption = Annotated[float, typer.Option(help="0 always takes the most likely token.")]
SeedOption = Annotated[int, typer.Option(help="Of sampling.")]
JudgeOption = typer.Option(
    help="A model that compares the answers, or an address on this machine: http://127.0.0.1:8000."
)
JudgeNameOption = Annotated[str | None, typer.Option(help="The model to ask at an address that serves more than one.")]
JudgeRulesOption = Annotated[
    Path | None, typer.Option(help="A TOML file with principles for the judge, and perhaps its question.")
]


def check_names(models: Sequence[str], judge: str | None, judge_name: str | None) -> list[str]:
    """The models that are files of this machine. It does not import torch: a mistyped name is refused at once."""
    address = judge is not None and "://" in judge
    if judge_name is not None and not address:
        raise typer.BadParameter("--judge-name is for an address that serves several models; give one with --judge")
    stored = [*models] if judge is None or address else [*models, judge]
    for name in stored:
        find_model(name)
    return stored


def read_question(constitution: Path | None) -> tuple[str, tuple[str, ...]]:
    """The question to a judge, and the principles in it."""
    from regard.feedback.constitution import read_constitution
    from regard.feedback.judge import TEMPLATE

    if constitution is None:
        return TEMPLATE, ()
    rules = read_constitution(constitution)
    return rules.judge, rules.texts


def open_judge(name: str, judge_name: str | None, device: str) -> "Judge":
    from regard.feedback.address_judge import AddressJudge, is_address
    from regard.feedback.judge import ModelJudge

    if is_address(name):
        return AddressJudge(name, judge_name)
    from regard.cli.open_model import open_model

    return ModelJudge(open_model(Path(name), device))


def describe_verdicts(verdicts: "Sequence[JudgeVerdict]") -> list[str]:
    from regard.feedback.judge import count_unanswered, position_bias

    lines = []
    if (bias := position_bias(verdicts)) is not None:
        lines.append(
            f"the judge preferred the answer shown first in {bias.chosen_first:.1%} of its verdicts "
            f"({bias.log_odds:+.2f} nats; 50 % is unbiased); {bias.inconsistent:.1%} of {bias.pairs} pairs depended on "
            "the order"
        )
    if unanswered := count_unanswered(verdicts):
        lines.append(f"the judge replied to {unanswered} of {2 * len(verdicts)} questions with neither A nor B")
    return lines


SECONDS_PER_LINE = 30  # of progress that is written to a file or a pipe


@contextmanager
def progress_bar(description: str, total: int, done: int = 0) -> "Generator[CountDone]":
    """A bar on a terminal; elsewhere a line now and then."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(compact=True))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(description, total=total, completed=done)
        shown = monotonic()

        def on_progress(completed: int) -> None:
            nonlocal shown
            bar.update(task, completed=completed)
            if bar.disable and monotonic() - shown >= SECONDS_PER_LINE:
                shown = monotonic()
                print(f"{description}: {completed}/{total}", file=sys.stderr, flush=True)

        yield on_progress
