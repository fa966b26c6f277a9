"""`regard pipeline`: several phases of training, one after the other, each measured."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.open_model import DeviceOption

if TYPE_CHECKING:
    from rich.console import Console

    from regard.data.world.answers import AnswerGrade

QUESTIONS = 400


def pipeline(
    name: Annotated[
        str, typer.Argument(metavar="PIPELINE", help="The name of a pipeline (assistant), or a TOML file.")
    ],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The directory; runs/NAME by default.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How often everything is trained, with other random numbers.")] = 1,
    questions: Annotated[int, typer.Option(min=1, help="Held-out questions per phase.")] = QUESTIONS,
    device: DeviceOption = "auto",
) -> None:
    """Train a model in phases: pretraining, supervised fine-tuning, preference tuning.

    After every phase the model answers held-out questions of the simulated world. The same command goes on after an
    interruption.

    \b
    Examples:
      regard pipeline assistant
      regard pipeline assistant --seeds 3 --out runs/assistant
    """
    from rich.console import Console

    from regard.pipeline import read_pipeline, run_pipeline

    console, phases = Console(stderr=True), read_pipeline(name)
    out = out or Path("runs") / Path(name).stem
    results: list[dict[str, Any]] = []
    for seed in range(seeds):
        grades: dict[str, list[AnswerGrade]] = {}

        def measure(phase: Any, path: Path, seed: int = seed, grades: dict[str, Any] = grades) -> None:
            results.append({"seed": seed, "phase": phase.name, **measure_phase(path, grades, questions, console)})

        stopped = run_pipeline(phases, out, seed, device, console, measure)
        if stopped is not None:
            raise typer.Exit(stopped.exit_code)
    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print_results(results)


def measure_phase(
    path: Path, grades: "dict[str, list[AnswerGrade]]", questions: int, console: "Console"
) -> dict[str, Any]:
    """The compute of a phase, and the grades of its model's answers; of a reward model, its accuracy on held-out pairs.

    grades: those of earlier phases by their names, to which the new ones are added.
    """
    from rich.progress import Progress

    from regard.engine.engine import Engine
    from regard.evals.answers import grade_assistant, win_rate
    from regard.load_model import load
    from regard.models.decoder import DecoderModule
    from regard.pipeline import phase_cost, read_records

    record, llm = asdict(phase_cost(path)), load(path, "cpu")
    if not isinstance(llm.model, DecoderModule):
        evaluations = [values for values in read_records(path) if "held_out_accuracy" in values]
        return record | {"accuracy": evaluations[-1]["held_out_accuracy"]}
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(f"answering {questions} questions", total=questions)
        found = grade_assistant(
            Engine(llm.model, rows=50),
            llm.tokenizer,
            questions,
            on_progress=lambda done: bar.update(task, completed=done),
        )
    reference = grades.get("sft")
    grades[path.name] = found
    return record | {
        "correct": sum(grade.correct for grade in found) / questions,
        "formatted": sum(grade.formatted for grade in found) / questions,
        "both": sum(all(grade) for grade in found) / questions,
        **({} if reference is None else {"win_rate": win_rate(found, reference).mean}),
    }


def print_results(results: list[dict[str, Any]]) -> None:
    """A row per phase: means over the seeds, with the largest deviation of a seed from them."""
    from rich.console import Console
    from rich.table import Table

    columns = {"correct": "correct", "formatted": "in form", "both": "both", "win_rate": "wins against sft"}
    total = sum(result["flops"] for result in results)
    table = Table("phase", *columns.values(), "accuracy on pairs", "compute", "minutes")
    for name in dict.fromkeys(result["phase"] for result in results):
        rows = [result for result in results if result["phase"] == name]
        cells = [spread([row[key] for row in rows if key in row]) for key in (*columns, "accuracy")]
        compute = sum(row["flops"] for row in rows)
        minutes = sum(row["seconds"] for row in rows) / len(rows) / 60
        table.add_row(name, *cells, f"{compute / total:.1%}", f"{minutes:.1f}")
    Console().print(table)


def spread(values: list[float]) -> str:
    if not values:
        return ""
    mean = sum(values) / len(values)
    error = f" ± {max(abs(value - mean) for value in values):.1%}" if len(values) > 1 else ""
    return f"{mean:.1%}{error}"
