"""`regard eval long`: how much of its context a model uses."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.open_model import ContextOption, DeviceOption, ModelArgument
from regard.find_model import find_model

if TYPE_CHECKING:
    from regard.data.world.long_texts import LongQuestion
    from regard.evals.long_context import LongReport
    from regard.language_model import LanguageModel

SHORTEST = 128  # tokens; the default lengths double from here to the context
ANSWER = 16  # tokens
SPARE = 8  # tokens, for longer questions and other borders of tokens


def evaluate_long(
    model: ModelArgument,
    lengths: Annotated[
        str | None,
        typer.Option(help=f"Tokens of the prompts: 256,1024,4096; by default {SHORTEST}, doubled up to the context."),
    ] = None,
    depths: Annotated[str, typer.Option(help="Depths of the answer in the text: 0 is the beginning, 1 the end.")] = (
        "0,0.25,0.5,0.75,1"
    ),
    tasks: Annotated[str | None, typer.Option(help="Tasks, of needle,several,hops,count; by default all.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Questions per task, length and depth.")] = 8,
    rows: Annotated[int, typer.Option(min=1, help="Prompts that are answered at once.")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Another number gives other texts.")] = 0,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="A folder for long.json, heat maps and report.html.")
    ] = None,
    context: ContextOption = None,
    device: DeviceOption = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure how much of its context a model uses: questions about long texts, by their length and depth.

    \b
    needle    where one thing lies, said once
    several   the same among eight things
    hops      a person takes a thing and walks on: where is the thing?
    count     how many people are in a place, each named once

    The filler is people who walk from place to place. The effective length is the largest up to which the model keeps
    85 % of its accuracy at the shortest length; a model with less than 50 % there has none. Chat models are asked in
    their chat template, others by a line `Answer:` after the question.

    \b
    Examples:
      regard eval long runs/demo --context 1024 --out long
      regard eval long smollm2 --lengths 256,512,1024 --depths 0,0.5,1 --count 4
      regard eval long MODEL --tasks needle,hops --json
    """
    from regard.data.world.long_texts import LONG_TASKS

    chosen = names_of(tasks, list(LONG_TASKS))
    found_depths = numbers_of("--depths", depths, float, 0, 1)
    found_lengths = None if lengths is None else numbers_of("--lengths", lengths, int, 1, 1 << 30)
    find_model(model)  # before torch is imported: a mistyped name is refused at once
    if out is not None:
        from regard.checkpoint.atomic_folder import check_writable

        path = out.absolute()
        check_writable(next(each for each in (path, *path.parents) if each.exists()), f"--out {out}")
    from rich.console import Console
    from rich.progress import Progress

    from regard.cli.open_model import open_model
    from regard.evals.long_context import WITHOUT_DEPTH, measure_context

    llm = open_model(model, device, context)
    llm.rows = rows
    found_lengths = found_lengths or doubled(SHORTEST, llm.engine.capacity - ANSWER)
    check_lengths(llm, found_lengths)
    cells = sum(1 if task in WITHOUT_DEPTH else len(found_depths) for task in chosen)
    total = count * cells * len(found_lengths)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        progress = bar.add_task(f"asking {total} questions", total=total)
        report = measure_context(
            answers_of(llm), lambda text: len(llm.tokenizer.encode(text)), found_lengths, found_depths, chosen, count,
            seed, margin_of(llm), lambda asked: bar.advance(progress, asked),
        )  # fmt: skip
    if out is not None:
        from regard.report.long_report import write_long_report

        write_long_report(report, str(model), out)
    print(json.dumps(report.to_json())) if as_json else print_report(report)
    if out is not None and not as_json:
        print(f"written: {out / 'report.html'}")


def names_of(value: str | None, known: list[str]) -> list[str]:
    names = known if value is None else [name.strip() for name in value.split(",")]
    wrong = [name for name in names if name not in known]
    if wrong:
        raise ValueError(f"--tasks {wrong[0]} is not a task; choose from {', '.join(known)}")
    return list(dict.fromkeys(names))


def numbers_of(option: str, value: str, kind: Callable, least: float, most: float) -> list:
    """The numbers of an option, ascending and without repetition."""
    try:
        numbers = [kind(part) for part in value.split(",")]
    except ValueError:
        raise ValueError(f"{option} {value!r} is not a list of numbers; separate them by commas") from None
    wrong = [number for number in numbers if not least <= number <= most]
    if wrong:
        raise ValueError(f"{option} {wrong[0]} is not between {least} and {most}")
    return sorted(set(numbers))


def check_lengths(llm: "LanguageModel", lengths: Sequence[int]) -> None:
    """Before any question is asked: every prompt has room for a text, and the longest leaves room for the answer."""
    capacity, margin = llm.engine.capacity, margin_of(llm)
    if max(lengths) > capacity - ANSWER:
        raise ValueError(
            f"--lengths {max(lengths)}: the model reads {capacity} tokens, of which the answer takes {ANSWER}; use at "
            f"most {capacity - ANSWER}, or a larger --context"
        )
    if min(lengths) <= margin:
        raise ValueError(
            f"--lengths {min(lengths)}: the question alone takes {margin} tokens with this model; use longer prompts"
        )


def doubled(first: int, last: int) -> list[int]:
    lengths = [first]
    while 2 * lengths[-1] <= last:
        lengths.append(2 * lengths[-1])
    return lengths


def margin_of(llm: "LanguageModel") -> int:
    """Tokens of a prompt beside its text."""
    question = "How many people are in the courtyard?"  # a long one
    if llm.tokenizer.chat_template is None:
        return len(llm.encode(f"\nQuestion: {question}\nAnswer:")) + SPARE
    return len(llm.encode_chat(messages("", question))) + SPARE


def messages(text: str, question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{text} {question}"}]


def answers_of(llm: "LanguageModel") -> "Callable[[Sequence[LongQuestion]], Sequence[str]]":
    def answers(questions: "Sequence[LongQuestion]") -> Sequence[str]:
        if llm.tokenizer.chat_template is not None:
            return llm.chat([messages(each.text, each.question) for each in questions], max_new=ANSWER, temperature=0)
        prompts = [f"{each.text}\nQuestion: {each.question}\nAnswer:" for each in questions]
        return llm.generate(prompts, max_new=ANSWER, temperature=0)

    return answers


def print_report(report: "LongReport") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("task", "depth", *(f"{length:,}" for length in report.lengths))
    for task in report.tasks:
        for depth in report.depths(task):
            cells = [report.select(task=task, length=length, depth=depth)[0] for length in report.lengths]
            place = "any" if depth is None else f"{depth:.0%}"
            table.add_row(task, place, *(f"{cell.accuracy:.0%}" for cell in cells))
    table.add_row("all", "", *(f"{report.accuracy(length):.0%}" for length in report.lengths))
    Console().print(table)
    print(f"{sum(cell.asked for cell in report.cells)} questions, {report.cells[0].asked} per cell")
    print(report.verdict)
