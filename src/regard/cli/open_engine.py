"""Options of commands that serve many requests, and the engine that they choose.

`auto` is decided here, and every choice is printed with its reason.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

from regard.cli.open_model import open_model

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from regard.engine.engine import Engine
    from regard.language_model import LanguageModel

RowsOption = Annotated[
    int | None, typer.Option(min=1, help="Requests that are decoded at once; by default chosen by the engine.")
]
MemoryOption = Annotated[
    float | None,
    typer.Option(help="Share of the memory for keys and values; by default 0.25 on a CPU, 0.8 on a GPU."),
]
QueueOption = Annotated[int, typer.Option(min=1, help="Requests that may wait; more are refused with 429.")]
DtypeOption = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option(help="Format of the weights and the cache; auto: as stored, on a CPU float32."),
]
CompileOption = Annotated[
    bool | None,
    typer.Option(
        "--compile/--no-compile", help="Decode by torch.compile: slow to start, then fast. By default on a GPU only."
    ),
]


class EngineChoice(NamedTuple):
    name: str
    value: str
    reason: str


def open_engine(
    model: Path,
    console: "Console",
    *,
    device: str,
    context: int | None,
    adapter: Path | None,
    dtype: str,
    rows: int | None,
    memory: float | None,
    queue: int,
    compile: bool | None,
) -> "LanguageModel":
    """The model with its engine. Prints what was chosen."""
    llm = open_model(model, device, context, adapter, dtype)
    from regard.engine.engine import Engine
    from regard.engine.inputs import decoder_of
    from regard.engine.memory import SHARES, bytes_of

    decoder = decoder_of(llm.model)
    weight = decoder.embedding.weight
    compiles = choose_compile(compile, weight.device)
    if compiles.value == "on":
        console.print("compiling the decode step …", highlight=False)
    engine = Engine(
        llm.model, rows=rows, capacity=context, source_capacity=context, memory=memory, queue=queue,
        compile=compiles.value == "on",
    )  # fmt: skip
    llm.engine, llm.rows = engine, engine.store.rows
    warm_up(engine, console)
    if compiles.value == "on" and engine.runner.compiled is None and engine.runner.graphs is None:
        compiles = EngineChoice("compile", "off", "torch cannot compile this model; its warning says why")
    stored = "as stored, on a CPU at least float32" if dtype == "auto" else "--dtype"
    available = "the memory" if weight.device.type == "cpu" else "the free memory of the GPU"
    share = f"--memory {memory}" if memory else f"at most {SHARES.get(weight.device.type, 0.25)} of {available}"
    reason = "the model's" if context is None else "--context"
    if engine.capacity < (context or decoder.spec.context or 0):
        reason = "what the store holds"
    choices = [
        EngineChoice("device", str(weight.device), "the GPU if there is one" if device == "auto" else "--device"),
        EngineChoice("dtype", str(weight.dtype).removeprefix("torch."), stored),
        EngineChoice("context", f"{engine.capacity} tokens", reason),
        EngineChoice("rows", str(engine.store.rows), "what this device decodes at once" if rows is None else "--rows"),
        EngineChoice("store", store_size(engine.store.metrics(), bytes_of(engine.store)), share),
        EngineChoice("queue", str(engine.queue), "more requests are refused with 429"),
        compiles,
    ]
    for name, value, reason in choices:
        console.print(f"  {name:<8} {value}  [dim]({reason})[/]", highlight=False)
    return llm


def warm_up(engine: "Engine", console: "Console") -> None:
    """Prepare the decode steps before the first request arrives, with a bar."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("preparing decode steps"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)
        engine.warm_up(lambda done, total: progress.update(task, completed=done, total=total))


def choose_compile(asked: bool | None, device: "torch.device") -> EngineChoice:
    from regard.compat import cannot_compile

    if asked is False:
        return EngineChoice("compile", "off", "--no-compile")
    if asked is None and device.type == "cpu":
        return EngineChoice("compile", "off", "a CPU starts sooner without it; --compile turns it on")
    reason = cannot_compile(device)
    if reason is not None:
        return EngineChoice("compile", "off", reason)
    return EngineChoice("compile", "on", "--compile" if asked else "this device decodes faster with it")


def store_size(metrics: dict[str, int], size: int) -> str:
    blocks = f"{metrics['blocks']:,} blocks, " if "blocks" in metrics else ""
    return f"{blocks}at most {size / 1e9:,.2f} GB"
