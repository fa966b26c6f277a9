"""The demo's story: train (or go on, or find the model there), ask, show, report."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from regard.cli.open_model import open_model
from regard.cli.training_run import begin, go_on
from regard.engine.engine import Engine
from regard.evals.world import GradedAnswer, by_kind, exact_match, examine
from regard.lens import attention_maps
from regard.models.decoder import DecoderModule
from regard.report.page import Page
from regard.report.plots import attention_grid, loss_curve
from regard.text.chat import encode_chat
from regard.text.tokenizer import Tokenizer
from regard.training.loop import TrainingResult
from regard.training.recipe import find_recipe, read_recipe, resolve

QUESTIONS = 500
SHOWN = 6  # answers on the screen and in the report


def demonstrate(out: Path, steps: int | None, questions: int | None) -> int:
    """-> exit code"""
    console = Console()
    summary = out / "summary.json"
    if summary.is_file():
        found = json.loads(summary.read_text(encoding="utf-8"))
        console.print(
            f"the model is there: {out} (exact match {found['exact_match']:.1%}); remove the folder to train anew"
        )
        if steps or questions:
            console.print("--steps and --questions change nothing now: it is trained and questioned")
        advise(console, out)
        return 0
    questions = questions or QUESTIONS
    trained = train(out, steps, console)
    if not trained.finished:
        return trained.exit_code
    model, tokenizer = open_model(out, "cpu")
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(f"asking {questions} questions about stories it has never seen", total=questions)
        answers = examine(Engine(model, rows=50), tokenizer, questions, told=lambda n: bar.update(task, completed=n))
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    result = {
        "exact_match": exact_match(answers),
        "questions": questions,
        "train_seconds": round(sum(record.get("seconds", 0.0) for record in records), 1),
        "parameters": sum(p.numel() for p in model.parameters()),
        "val_loss": [record["held_out_loss"] for record in records if "held_out_loss" in record][-1],
    }
    show(console, answers, result)
    report(out, answers, result, model, tokenizer)
    summary.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    console.print(f"\nreport: {out / 'report.html'}")
    advise(console, out)
    return 0


def train(out: Path, steps: int | None, console: Console) -> TrainingResult:
    if (out / "config.json").is_file():
        console.print(f"going on with {out}" + (", as it was begun: --steps changes nothing now" if steps else ""))
        return go_on(out, "cpu", console)
    overrides = {} if steps is None else {"train.steps": str(steps)}
    recipe, tokenizer = resolve(read_recipe(find_recipe("demo"), overrides))
    console.print(
        "a small world: people walk, take and give things; can a model that has read such stories answer questions?"
    )
    return begin(out, recipe, tokenizer, "cpu", console)


def show(console: Console, answers: list[GradedAnswer], result: dict[str, Any]) -> None:
    console.print(f"\n[bold]{answers[0].story.text}[/]\n")
    table = Table("question", "it says", "right answer", title="about stories it has never seen", title_justify="left")
    for answer in answers[:SHOWN]:
        colour = "green" if answer.correct else "red"
        table.add_row(answer.question.text, f"[{colour}]{escape(answer.said)}[/]", answer.question.answer)
    console.print(table)
    kinds = ", ".join(f"{kind} {right}/{asked}" for kind, (right, asked) in by_kind(answers).items())
    console.print(f"exact match on {len(answers)} held-out questions: [bold]{result['exact_match']:.1%}[/]  ({kinds})")


def report(
    out: Path, answers: list[GradedAnswer], result: dict[str, Any], model: DecoderModule, tokenizer: Tokenizer
) -> None:
    """The same as a page with pictures."""
    page = Page("A small model of a small world")
    page.text(f"{result['exact_match']:.1%}", "big")
    page.text(
        f"of {len(answers)} questions about stories it has never seen were answered exactly, "
        f"by {result['parameters']:,} parameters after {result['train_seconds']:.0f} seconds of training."
    )
    loss_curve(out / "metrics.jsonl", out / "loss.png")
    page.picture(out / "loss.png", "The loss as it fell.")
    page.heading("Questions and answers")
    page.table(
        ["story", "question", "it says", "right answer"],
        [
            ((a.story.text, a.question.text, a.said, a.question.answer), "right" if a.correct else "wrong")
            for a in answers[:SHOWN]
        ],
    )
    page.heading("By kind of question")
    page.table(
        ["kind", "right", "asked"],
        [((kind, str(right), str(asked)), "") for kind, (right, asked) in by_kind(answers).items()],
    )
    page.heading("Where it looks")
    asked = answers[0]
    ids = encode_chat(tokenizer, [{"role": "user", "content": f"{asked.story.text} {asked.question.text}"}])
    layers = enumerate(attention_maps(model, ids))
    maps = {(i, h): weights[h] for i, weights in layers if weights is not None for h in range(len(weights))}
    attention_grid(maps, [tokenizer.decode_token(id) for id in ids], out / "attention.png")
    page.picture(out / "attention.png", f"Every head reading: {asked.story.text} {asked.question.text}")
    sharp = max(maps, key=lambda place: float(maps[place][-1].max()))
    attention_grid({sharp: maps[sharp]}, [tokenizer.decode_token(id) for id in ids], out / "head.png")
    page.picture(
        out / "head.png",
        f"The head whose last token is surest of where to look; the answer is {asked.question.answer!r}.",
    )
    page.write(out / "report.html")


def advise(console: Console, out: Path) -> None:
    console.print(f"talk to it: regard chat {out} --temperature 0      look inside: regard serve {out}")
