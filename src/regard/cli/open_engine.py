"""Options of commands that serve many requests, and the engine that they choose.

`auto` is decided here, and every choice is printed with its reason.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from regard.engine.adapters import Adapters
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
QuantizeOption = Annotated[
    Literal["int8"] | None,
    typer.Option(help="Keep the weights of linear layers in eight bits: less memory, faster decoding on a CPU."),
]
BatchInvariantOption = Annotated[
    bool,
    typer.Option(
        "--batch-invariant",
        help="Compute a request bitwise the same beside any others: slower, on a GPU, for models like Llama and Qwen.",
    ),
]


class EngineChoice(NamedTuple):
    name: str
    value: str
    reason: str


class EngineOptions(NamedTuple):
    """The options of a command, for each of its models. None: chosen here."""

    device: str = "auto"
    context: int | None = None
    adapter: Path | None = None
    dtype: str = "auto"
    rows: int | None = None
    memory: float | None = None  # all engines together
    queue: int = 256
    compile: bool | None = None
    max_cpu_loras: int = 64
    max_loras: int = 8
    tensor_parallel: int = 1
    batch_invariant: bool = False
    quantize: str | None = None


def open_engine(
    llm: "LanguageModel",
    console: "Console",
    options: EngineOptions,
    index: int = 0,
    engines: int = 1,
    path: Path | None = None,
) -> None:
    """Give the model its engine, and print what was chosen. `index` of `engines` that share the memory, in order.

    path: of the model, for the other processes of a tensor parallel engine.
    """
    from regard.engine.engine import Engine
    from regard.engine.inputs import decoder_of
    from regard.engine.memory import SHARES, bytes_of, divided_share

    context, rows, memory = options.context, options.rows, options.memory
    decoder = decoder_of(llm.model)
    weight = decoder.embedding.weight
    parallel = options.tensor_parallel > 1
    compiles = choose_compile(False if parallel else options.compile, weight.device)
    if parallel:
        compiles = EngineChoice("compile", "off", "--tensor-parallel: the steps of several processes run eagerly")
    if compiles.value == "on":
        console.print("compiling the decode step …", highlight=False)
    part = divided_share(memory, index, engines, weight.device) if engines > 1 else memory
    if parallel:
        from regard.cli.tensor_parallel import open_parallel_engine, stop_server

        assert path is not None, "the other processes load the model too"
        open_parallel_engine(
            path, llm, options.tensor_parallel, options.adapter, options.dtype, stop_server, rows=rows,
            capacity=context, memory=part, queue=options.queue,
        )  # fmt: skip
        engine = llm.engine
    else:
        engine = Engine(
            llm.model, rows=rows, capacity=context, source_capacity=context, memory=part, queue=options.queue,
            compile=compiles.value == "on", max_cpu_loras=options.max_cpu_loras,
            max_loras=options.max_loras, batch_invariant=options.batch_invariant,
        )  # fmt: skip
    llm.engine, llm.rows = engine, engine.store.rows
    warm_up(engine, console)
    if compiles.value == "on" and engine.runner.compiled is None and engine.runner.graphs is None:
        compiles = EngineChoice("compile", "off", "torch cannot compile this model; its warning says why")
    stored = "as stored, on a CPU at least float32" if options.dtype == "auto" else "--dtype"
    available = "the memory" if weight.device.type == "cpu" else "the free memory of the GPU"
    share = f"--memory {memory}" if memory else f"at most {SHARES.get(weight.device.type, 0.25)} of {available}"
    if engines > 1:
        share += f", for {engines} models in equal parts"
    reason = "the model's" if context is None else "--context"
    if engine.capacity < (context or decoder.spec.context or 0):
        reason = "what the store holds"
    choices = [
        EngineChoice(
            "device", str(weight.device), "the GPU if there is one" if options.device == "auto" else "--device"
        ),
        EngineChoice("dtype", str(weight.dtype).removeprefix("torch."), stored),
        *([EngineChoice("weights", options.quantize, "--quantize")] if options.quantize else []),
        EngineChoice("context", f"{engine.capacity} tokens", reason),
        EngineChoice("rows", str(engine.store.rows), "what this device decodes at once" if rows is None else "--rows"),
        EngineChoice("store", store_size(engine.store.metrics(), bytes_of(engine.store)), share),
        *([EngineChoice("ranks", str(options.tensor_parallel), "--tensor-parallel")] if parallel else []),
        EngineChoice("queue", str(engine.queue), "more requests are refused with 429"),
        compiles,
        *([EngineChoice("batch", "invariant", "--batch-invariant")] if options.batch_invariant else []),
    ]
    for name, value, reason in choices:
        console.print(f"  {name:<8} {value}  [dim]({reason})[/]", highlight=False)


def warm_up(engine: "Engine | Adapters", console: "Console") -> None:
    """Prepare the decode steps before the first request arrives, with a bar."""
    from functools import partial

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from regard.compat import run_in_thread

    columns = (TextColumn("preparing decode steps"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)
        prepare = partial(engine.warm_up, lambda done, total: progress.update(task, completed=done, total=total))
        run_in_thread(prepare) if next(engine.model.parameters()).device.type == "cpu" else prepare()


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
