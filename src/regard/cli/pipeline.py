"""`regard pipeline`: several phases of training, one after the other, each measured."""

import platform
from pathlib import Path
from typing import Annotated, Any

import typer

from regard.cli.open_model import DeviceOption

QUESTIONS = 400


def pipeline(
    name: Annotated[
        str, typer.Argument(metavar="PIPELINE", help="The name of a pipeline (assistant), or a TOML file.")
    ],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The directory; runs/NAME by default.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    seeds: Annotated[int, typer.Option(min=1, help="How often everything is trained, with other random numbers.")] = 1,
    questions: Annotated[int, typer.Option(min=1, help="Held-out questions per phase.")] = QUESTIONS,
    device: DeviceOption = "auto",
) -> None:
    """Train a model in phases: pretraining, supervised fine-tuning, preference tuning, reinforcement learning.

    After every phase the model answers held-out questions of the simulated world. The same command goes on after an
    interruption. Results of other seeds stay in results.json, so seeds may also be trained by several processes.
    `assistant` takes about a quarter of an hour on two CPU cores.

    \b
    Examples:
      regard pipeline assistant
      regard pipeline assistant --seeds 3 --out runs/assistant
      regard pipeline assistant --seed 2 --out runs/assistant   # one seed; --seeds 3 then reuses its runs
    """
    import torch
    from rich.console import Console
    from rich.progress import Progress

    from regard import __version__
    from regard.pipeline import read_pipeline, run_pipeline
    from regard.pipeline_results import Grades, measure_phase, write_results

    console, phases = Console(stderr=True), read_pipeline(name)
    out = out or Path("runs") / Path(name).stem
    results: list[dict[str, Any]] = []
    found: dict[str, Any] = {}
    for number in range(seed, seed + seeds):
        grades: Grades = {}

        def measure(path: Path, number: int = number, grades: Grades = grades) -> None:
            with Progress(console=console, transient=True) as bar:
                task = bar.add_task(f"answering {questions} questions", total=questions)
                measured = measure_phase(path, grades, questions, lambda done: bar.update(task, completed=done))
            results.append({"seed": number} | measured)

        stopped = run_pipeline(phases, out, number, device, console, measure)
        if stopped is not None:
            raise typer.Exit(stopped.exit_code)
        settings = {"regard": __version__, "torch": torch.__version__, "machine": platform.machine()}
        about = {"pipeline": Path(name).stem, "questions": questions, "settings": settings}
        found = write_results(out / "results.json", about, [run for run in results if run["seed"] == number])
    print_phases(found["phases"], len(found["seeds"]))


def print_phases(phases: list[dict[str, Any]], seeds: int) -> None:
    """How well each phase answers, in percent: means over the seeds, with the largest deviation of a seed from them;
    then what the phases cost."""
    from rich.console import Console
    from rich.table import Table

    columns = {
        "correct": "correct %",
        "formatted": "in form %",
        "both": "both %",
        "win_rate": "wins against sft %",
        "accuracy": "pairs in order %",
    }
    answers, costs = Table("phase", *columns.values()), Table("phase", "tokens", "FLOPs", "share of FLOPs", "minutes")
    for phase in phases:
        name, tokens, minutes = phase["phase"], phase["tokens"]["mean"] / 1e6, phase["seconds"]["mean"] / 60
        answers.add_row(name, *(percent(phase.get(key), seeds) for key in columns))
        costs.add_row(
            name, f"{tokens:.2f} M", f"{phase['flops']['mean']:.1e}", f"{phase['share']:.0%}", f"{minutes:.1f}"
        )
    console = Console()
    console.print(answers)
    console.print(costs)


def percent(measured: dict[str, float] | None, seeds: int) -> str:
    if measured is None:
        return ""
    mean = measured["mean"]
    error = max(measured["high"] - mean, mean - measured["low"])
    return f"{mean:.1%} ± {error:.1%}".replace("%", "") if seeds > 1 else f"{100 * mean:.1f}"
