"""`regard eval MODEL --tasks …`: tasks in files, of the world and of lm-evaluation-harness, on a model or a server."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.compare import check_output
from regard.cli.open_model import AdapterOption, DeviceOption
from regard.find_model import find_model

if TYPE_CHECKING:
    from regard.evals.scoring import ScoredModel
    from regard.evals.task_file import EvalTask
    from regard.evals.task_run import TaskResult

SERVERS = ("http://", "https://")


def evaluate_tasks(
    ctx: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="MODEL|URL", help="A model, or the address of an OpenAI-compatible server.")
    ],
    tasks: Annotated[
        list[str],
        typer.Option(help="A TOML file of a task, a file of rows or text, or a task of the world; a,b for several."),
    ],
    limit: Annotated[int | None, typer.Option(min=1, help="The first rows of each task only.")] = None,
    shots: Annotated[
        int, typer.Option(min=0, help="Examples before each prompt, of the file that the task names.")
    ] = 0,
    chat: Annotated[bool, typer.Option(help="Ask in the chat template of the model.")] = False,
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a text that are read at once; by default all that can be.")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, max=128, help="Rows that are computed at once.")] = 16,
    adapter: AdapterOption = None,
    device: DeviceOption = "auto",
    name: Annotated[str | None, typer.Option(help="The model of a server; by default its first.")] = None,
    key: Annotated[str | None, typer.Option(envvar="REGARD_KEY", help="API key of the server.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="The tokenizer of a server's model: its folder, for servers without /tokenize.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="A JSON file of all results, row by row.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Evaluate a model, or a model behind a server, on tasks that are written as files.

    \b
    perplexity   bits per byte of texts
    choice       the most likely of several choices: accuracy, and accuracy_norm by the mean over characters
    generation   greedy outputs against references: exact match, the same normalized, F1 of words, ROUGE-L

    A task is a TOML file with its kind, its file of rows and its prompt template; a JSONL file with the columns prompt,
    choices and answer, or prompt and answer, or text; or a text file. Tasks of the world are world-stories,
    world-choices and world-questions. A .yaml file is a task of lm-evaluation-harness (pip install 'regard[lm-eval]').

    Contexts longer than the model's are truncated from the left, and the number of those rows is printed. ± is the
    standard error over the rows.

    \b
    Examples:
      regard eval smollm2 --tasks capitals.toml,book.txt --limit 100
      regard eval smollm2 --tasks capitals.toml --shots 4 --out results.json
      regard eval runs/demo --tasks world-choices --tasks world-questions --chat
      regard eval http://127.0.0.1:8000 --tasks capitals.toml --json
    """
    is_server = model.startswith(SERVERS)
    source = ctx.get_parameter_source("key")
    key_given = source is not None and source.name == "COMMANDLINE"
    refuse_ignored_options(is_server, adapter, device, name, key_given, tokenizer)
    if not is_server:
        find_model(Path(model))  # before torch is imported: a mistyped name is refused at once
    names = [name.strip() for given in tasks for name in given.split(",") if name.strip()]
    if not names:
        raise typer.BadParameter("--tasks names no task; give a file, or a task of the world such as world-choices")
    if out is not None:
        for each in names:
            check_output(out, each)
        if out.exists() and not is_result(out):
            raise ValueError(f"--out {out} exists and is no result of an evaluation; choose another name")
    opened = [open_task(name) for name in dict.fromkeys(names) if not is_of_lm_eval(name)]
    foreign = [name for name in dict.fromkeys(names) if is_of_lm_eval(name)]
    check_lm_eval(foreign, is_server)
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from regard.evals.task_run import check_options, evaluate_task, work_of

    for task in opened:
        check_options(task, shots, chat)
    if is_server:
        scored = open_server(model, name, key, tokenizer, rows, context)
    else:
        scored = open_local(model, device, adapter, rows, context)
    results: list[TaskResult] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        for task in opened:
            progress = bar.add_task(task.name, total=work_of(task, limit))

            def advance(done: int, progress: Any = progress) -> None:
                bar.advance(progress, done)

            results.append(evaluate_task(scored, task, limit, shots, chat, advance))
    if foreign:
        from regard.evals.lm_eval_model import run_lm_eval
        from regard.evals.local_model import LocalModel

        assert isinstance(scored, LocalModel), "servers are refused"
        results += [result for task in foreign for result in run_lm_eval(scored, task, limit, shots, chat)]
    found = {"model": model, "chat": chat, "window": scored.window, "tasks": [result.to_json() for result in results]}
    if out is not None:
        out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if as_json:
        for task in found["tasks"]:
            del task["samples"]
        print(json.dumps(found))
        return
    print_results(results, scored.window)
    if out is not None:
        print(f"written: {out}")


def is_result(path: Path) -> bool:
    """Whether an earlier call has written the file; any other may be the data of a task."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and {"model", "tasks"} <= found.keys()


def refuse_ignored_options(
    is_server: bool, adapter: Any, device: str, name: Any, key_given: bool, tokenizer: Any
) -> None:
    """key_given: on the command line; a key in the environment is no reason to refuse a model."""
    local = {"--adapter": adapter is not None, "--device": device != "auto"}
    remote = {"--name": name is not None, "--key": key_given, "--tokenizer": tokenizer is not None}
    given = [option for option, is_given in (local if is_server else remote).items() if is_given]
    if given:
        whose = "a model on this machine; the server has chosen" if is_server else "a server; leave it out"
        raise typer.BadParameter(f"{given[0]} is for {whose}")


def is_of_lm_eval(name: str) -> bool:
    return Path(name).suffix in (".yaml", ".yml")


def check_lm_eval(tasks: list[str], is_server: bool) -> None:
    """Raise ValueError if these tasks cannot run. Nothing is downloaded for them."""
    if not tasks:
        return
    if is_server:
        raise ValueError(
            f"{tasks[0]} is a task of lm-eval, which asks servers itself: lm-eval run --model local-completions"
        )
    if missing := [task for task in tasks if not Path(task).is_file()]:
        raise FileNotFoundError(f"{missing[0]} is not a file; check the path")
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", DISABLE_MULTIPROC="1")  # read when it is imported
    try:
        import lm_eval  # noqa: F401
    except ModuleNotFoundError:
        raise ValueError(f"{tasks[0]} is a task of lm-eval: pip install 'regard[lm-eval]'") from None


def open_task(name: str) -> "EvalTask":
    from regard.evals.task_file import read_task
    from regard.evals.world_tasks import WORLD_TASKS
    from regard.spec import suggest_name

    if name in WORLD_TASKS:
        return WORLD_TASKS[name]()
    if not Path(name).exists() and not Path(name).suffix:
        raise ValueError(f"{name} is neither a file nor a task of the world; {suggest_name(name, WORLD_TASKS)}")
    return read_task(name)


def open_local(model: str, device: str, adapter: Path | None, rows: int, context: int | None) -> "ScoredModel":
    from regard.evals.local_model import LocalModel
    from regard.load_model import load

    llm = load(model, device, adapter=adapter)
    llm.rows = rows
    return LocalModel(llm, rows, context, model)


def open_server(
    url: str, name: str | None, key: str | None, tokenizer: Path | None, rows: int, context: int | None
) -> "ScoredModel":
    try:
        from regard.evals.remote_model import RemoteModel
    except ModuleNotFoundError:
        raise ValueError("evaluating a server needs more packages: pip install 'regard[serve]'") from None
    from regard.text.tokenizer import Tokenizer

    return RemoteModel(url, name, key, None if tokenizer is None else Tokenizer.load(tokenizer), rows, context)


def print_results(results: "list[TaskResult]", window: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("task", "rows", "shots", "metric", "value", "±")
    for result in results:
        cells = [result.task, f"{result.rows:,}", str(result.shots)]
        for metric, (value, error) in result.metrics.items():
            table.add_row(*cells, metric, f"{value:.4f}", "" if error is None else f"{error:.4f}")
            cells = ["", "", ""]
    Console().print(table)
    for result in results:
        if result.truncated:
            print(f"{result.task}: {result.truncated} rows, longer than {window} tokens, were truncated from the left")
