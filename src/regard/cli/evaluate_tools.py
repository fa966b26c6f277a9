"""`regard eval tools`: held-out tasks of the simulated world, solved with tools and without."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.open_model import ContextOption, DeviceOption, ModelArgument, open_chat_model

if TYPE_CHECKING:
    from regard.evals.tool_use import SolvedTask

SHOWN_FAILURES = 4


def evaluate_tools(
    model: ModelArgument,
    count: Annotated[int, typer.Option(min=1, help="Held-out tasks.")] = 200,
    level: Annotated[int, typer.Option(help="Level of the simulated worlds.")] = 1,
    context: ContextOption = None,
    device: DeviceOption = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object with all answers.")] = False,
) -> None:
    """Measure what a model solves with tools and what without, on held-out tasks of the simulated world.

    The tasks are arithmetic, places and prices that only a database holds, and both in one question. The tools are a
    calculator and SQL on the database of the task. The recipe `tools` trains a model for them.

    \b
    Examples:
      regard eval tools runs/tools
      regard eval tools smollm2 --count 20 --json
    """
    from rich.console import Console
    from rich.progress import Progress

    from regard.agents.model_writer import ModelWriter
    from regard.data.world import LEVELS
    from regard.evals.tool_use import solve_tasks

    if level not in LEVELS:
        raise ValueError(f"--level {level} is not a level of the world; choose one of {', '.join(map(str, LEVELS))}")
    llm = open_chat_model(model, device, context)
    writer = ModelWriter(llm.tokenizer, llm.texts, llm.grammars)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"solving {count} tasks", total=count)
        solved = solve_tasks(writer, count, level, lambda done: bar.update(task, completed=done))
    print_json(solved) if as_json else print_solved(solved)


def print_json(solved: "list[SolvedTask]") -> None:
    rows = [
        {
            "kind": each.task.kind, "question": each.task.question, "target": each.task.answer,
            "with_tools": each.with_tools, "without_tools": each.without_tools, "calls": each.calls,
        }
        for each in solved
    ]  # fmt: skip
    rates = [sum(each.correct[index] for each in solved) / len(solved) for index in (0, 1)]
    print(json.dumps({"with_tools": rates[0], "without_tools": rates[1], "tasks": rows}))


def print_solved(solved: "list[SolvedTask]") -> None:
    from rich.console import Console
    from rich.table import Table

    from regard.evals.tool_use import counts_by_kind

    table = Table("task", "with tools", "without", "tasks")
    counts = counts_by_kind(solved)
    total = tuple(sum(values) for values in zip(*counts.values(), strict=True))
    for kind, (with_tools, without, asked) in [*counts.items(), ("all", total)]:
        table.add_row(kind, f"{with_tools / asked:.1%}", f"{without / asked:.1%}", str(asked))
    Console().print(table)
    for each in [each for each in solved if not each.correct[0]][:SHOWN_FAILURES]:
        print(f"question  {each.task.question}\ntarget    {each.task.answer}\nanswer    {each.with_tools}\n")
