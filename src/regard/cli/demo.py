"""`regard demo`: train a small model in minutes, ask it questions, write a report."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from regard.evals.world import GradedAnswer
    from regard.training.loop import TrainingResult

QUESTIONS = 500
SHOWN_ANSWERS = 6


def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="The run's directory.")] = Path("runs/demo"),
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps, instead of the recipe's.")] = None,
    questions: Annotated[
        int | None, typer.Option(min=1, help=f"Number of held-out questions; {QUESTIONS} by default.")
    ] = None,
) -> None:
    """Train a small model in minutes and write a report.

    The model is trained on stories about a small world of people, places and things. Then it answers questions about
    stories that were not in its training data.

    \b
    Examples:
      regard demo
      regard demo --out runs/short --steps 100 --questions 50
      regard chat runs/demo --temperature 0
    """
    from rich.console import Console

    console = Console()
    if (out / "summary.json").is_file():
        exact_match = json.loads((out / "summary.json").read_text(encoding="utf-8"))["exact_match"]
        console.print(f"{out} is trained (exact match {exact_match:.1%}); remove the folder to train again")
        if steps or questions:
            console.print("--steps and --questions have no effect on a finished demo")
    else:
        result = train(out, steps, console)
        if not result.finished:
            raise typer.Exit(result.exit_code)
        evaluate(out, questions or QUESTIONS, console)
    console.print(f"chat with it: regard chat {out} --temperature 0      inspect it: regard serve {out}")


def train(out: Path, steps: int | None, console: "Console") -> "TrainingResult":
    from regard.training.recipe import find_recipe, read_recipe, resolve
    from regard.training_run import resume_run, start_run

    if (out / "config.json").is_file():
        console.print(f"resuming {out}" + ("; --steps has no effect on a run that was started" if steps else ""))
        return resume_run(out, "cpu", console)
    overrides = {} if steps is None else {"train.steps": str(steps)}
    resolved = resolve(read_recipe(find_recipe("demo"), overrides))
    console.print("training on stories of a small world in which people move and carry things")
    return start_run(out, resolved, "cpu", console)


def evaluate(out: Path, questions: int, console: "Console") -> None:
    """Answer held-out questions with the trained model; print the result and write summary.json and report.html."""
    from rich.progress import Progress

    from regard.cli.open_model import open_model
    from regard.engine.engine import Engine
    from regard.evals.world import answer_questions, share_correct
    from regard.report.page import write_report

    llm = open_model(out, "cpu")
    model, tokenizer = llm.model, llm.tokenizer
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(f"answering {questions} questions about held-out stories", total=questions)
        answers = answer_questions(
            Engine(model, rows=50), tokenizer, questions, on_progress=lambda done: bar.update(task, completed=done)
        )
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    summary = {
        "exact_match": share_correct(answers),
        "questions": questions,
        "train_seconds": round(sum(record.get("seconds", 0.0) for record in records), 1),
        "parameters": sum(p.numel() for p in model.parameters()),
        "val_loss": [record["held_out_loss"] for record in records if "held_out_loss" in record][-1],
    }
    print_answers(answers, summary, console)
    write_report(out, answers, SHOWN_ANSWERS, summary, model, tokenizer)
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    console.print(f"\nreport: {out / 'report.html'}")


def print_answers(answers: "list[GradedAnswer]", summary: dict[str, Any], console: "Console") -> None:
    from rich.markup import escape
    from rich.table import Table

    from regard.evals.world import counts_by_kind

    console.print(f"\n[bold]{answers[0].story.text}[/]\n")
    table = Table("question", "model's answer", "correct answer", title="held-out stories", title_justify="left")
    for graded in answers[:SHOWN_ANSWERS]:
        colour = "green" if graded.correct else "red"
        table.add_row(graded.question.text, f"[{colour}]{escape(graded.answer)}[/]", graded.question.answer)
    console.print(table)
    kinds = ", ".join(f"{kind} {correct}/{asked}" for kind, (correct, asked) in counts_by_kind(answers).items())
    console.print(f"exact match on {len(answers)} held-out questions: [bold]{summary['exact_match']:.1%}[/]  ({kinds})")
