"""`regard agent`: a model that calls tools until it can answer."""

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.open_model import ContextOption, DeviceOption, ModelArgument, open_chat_model
from regard.find_model import find_model

if TYPE_CHECKING:
    from regard.agents.tool import AgentTool

NAMED = ("calculator", "search", "sql")


def agent(
    model: ModelArgument,
    question: Annotated[
        str | None,
        typer.Argument(metavar="QUESTION", help="The question; - reads it from standard input; none: a chat."),
    ] = None,
    tools: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Tools to offer, of calculator,search,sql; by default calculator, search with --index, sql with "
            "--database.",
        ),
    ] = None,
    index: Annotated[Path | None, typer.Option(help="An index of documents, for the tool search.")] = None,
    database: Annotated[Path | None, typer.Option(help="A SQLite file, for the tool sql; it is only read.")] = None,
    python: Annotated[
        bool, typer.Option("--python", help="Let the model run Python programs, in a process with few rights.")
    ] = False,
    mcp: Annotated[
        list[str] | None,
        typer.Option(metavar="COMMAND", help="An MCP server over stdio, whose tools are offered; may be repeated."),
    ] = None,
    max_steps: Annotated[int, typer.Option(min=1, help="Replies of the model per question.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of all these replies.")] = 4096,
    temperature: Annotated[float, typer.Option(help="0 always takes the most likely token.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="With the same seed the answers are the same; -1: random.")] = None,
    system: Annotated[str | None, typer.Option(help="The system message of the conversation.")] = None,
    trace: Annotated[Path | None, typer.Option(help="A file to which every event is appended, as JSON lines.")] = None,
    context: ContextOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Let a model answer with tools: it calls one, reads the result, and goes on until it answers.

    Only offered tools run, and only with valid arguments. A grammar enforces both during generation, except with
    Mistral's templates and for schemas that it does not support. The results are data: nothing in them can end a
    message or call a tool. Errors go to the model. Without a question, every line is one, in one conversation; Ctrl-C
    stops an answer, Ctrl-D leaves. The exit code is 1 without an answer.

    \b
    Examples:
      regard agent smollm2 "What is 347 * 58?"
      regard agent MODEL "Who repairs the pump?" --index notes.index
      regard agent MODEL "How many orders came in May?" --database shop.db --tools sql,calculator --trace trace.jsonl
      regard agent MODEL "What are the first ten primes?" --python
      regard agent MODEL "What is in the calendar?" --mcp "calendar-server --stdio"
    """
    if trace is not None and not trace.parent.is_dir():
        raise ValueError(f"--trace {trace}: the folder {trace.parent} does not exist; make it, or give another file")
    names = chosen_tools(tools, index, database)
    find_model(model)  # before torch is imported: a mistyped name is refused at once
    from regard.agents.loop import AgentLimits
    from regard.agents.tool import Toolbox
    from regard.cli.agent_session import AgentSession

    with ExitStack() as stack:
        offered = open_tools(names, index, database, python, device)
        for command in mcp or []:
            from regard.agents.mcp import McpServer

            offered += stack.enter_context(McpServer(command)).tools
        toolbox = Toolbox(offered)
        llm = open_chat_model(model, device, context)
        limits = AgentLimits(steps=max_steps, tokens=max_tokens)
        session = AgentSession(llm, toolbox, limits, system, trace, temperature=temperature, seed=seed)
        if question is None:
            return session.converse()
        text = sys.stdin.read().strip() if question == "-" else question
        if not text.strip():
            raise ValueError("the question is empty; ask for something")
        if session.answer(text) is None:
            raise typer.Exit(1)


def chosen_tools(tools: str | None, index: Path | None, database: Path | None) -> list[str]:
    """The names of the tools, each of which has what it needs."""
    needs = {"search": ("--index", index), "sql": ("--database", database)}
    if tools is None:
        return [name for name in NAMED if name not in needs or needs[name][1] is not None]
    names = [name.strip() for name in tools.split(",") if name.strip()]
    for name in names:
        if name not in NAMED:
            raise ValueError(f"--tools: there is no tool {name!r}; choose from {', '.join(NAMED)}, or add --python")
        if name in needs and needs[name][1] is None:
            raise ValueError(f"--tools: {name} needs {needs[name][0]}; add it, or leave {name} out")
    for name, (option, value) in needs.items():
        if value is not None and name not in names:
            raise ValueError(f"{option} is for the tool {name}; add it to --tools, or leave {option} out")
    return names


def open_tools(
    names: list[str], index: Path | None, database: Path | None, python: bool, device: str
) -> "list[AgentTool]":
    from regard.agents.calculator import calculator
    from regard.agents.sql import sql_tool

    found = [calculator()] if "calculator" in names else []
    if "search" in names:
        from regard.agents.search import search_tool
        from regard.cli.ask import shown_path
        from regard.cli.index import embedder, open_index

        assert index is not None
        opened, encoder = open_index(index, device)
        found.append(search_tool(opened, embedder(encoder), show_path=shown_path))
    if "sql" in names:
        assert database is not None
        found.append(sql_tool(database))
    if python:
        from regard.agents.python import ISOLATED_FROM, python_limits, python_tool

        if missing := ISOLATED_FROM - python_limits():
            typer.echo(
                f"--python: on this system, programs are not isolated from: {', '.join(sorted(missing))}", err=True
            )
        found.append(python_tool())
    return found
