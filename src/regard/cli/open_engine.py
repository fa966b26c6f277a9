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
    str | None,
    typer.Option(
        help="Keep the weights of linear layers in few bits, rounded to nearest: int8, int4, nf4, fp8, q8_0, q4_0, "
        "q4_1, q4_k …; `regard quantize` rounds better. stored: all matrices of a GGUF file as they are in the file."
    ),
]
CacheOption = Annotated[
    str | None,
    typer.Option(
        metavar="KIND",
        help="A smaller cache of keys and values: int8, fp8 or int4 (int4:64 keeps the newest 64 tokens as they are), "
        "sinks:4+1020 (first and newest tokens, for texts without end), window:1024 (newest tokens), "
        "h2o:512 (per head the newest tokens and those with most attention), snapkv:512 (of the prompt, those that its "
        "end attends to).",
    ),
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


RUNS_EAGERLY = EngineChoice("compile", "off", "--tensor-parallel: the steps of several processes run eagerly")


INVARIANT_OR_QUANTIZED = "--batch-invariant does not support --quantize; leave one of them out"


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
    cache: str | None = None
    speculate: str | None = None
    draft_tokens: int = 5
    draft_chains: int = 1


def excludes_drafts(options: EngineOptions) -> bool:
    """Whether an option is given that does not support --speculate."""
    return options.batch_invariant or options.tensor_parallel > 1


def check_cache(options: EngineOptions) -> None:
    """Raise ValueError for options that exclude --cache, and for a description of no cache."""
    if options.cache is None:
        return
    from regard.engine.caches import parse_cache

    parse_cache(options.cache)
    if options.batch_invariant or options.tensor_parallel > 1:
        raise ValueError("--cache does not support --batch-invariant and --tensor-parallel; leave one of them out")


def quantize_weights(model: "torch.nn.Module", name: str) -> None:
    """Round the linear layers of a model to a format, in place.

    SpecError if none has a shape that it allows, or if the model is quantized already.
    """
    from torch import nn

    from regard.adapt import pack_weights, quantize_linears
    from regard.adapt.stored_weight import StoredWeight
    from regard.formats.names import format_named
    from regard.spec import require

    for path, module in model.named_modules():
        if isinstance(module, StoredWeight):
            kind = module.format.kind
            require(False, f"--quantize {name}: {path} is stored as {kind} already; leave --quantize out")
    require(
        bool(quantize_linears(model, format_named(name))),
        f"--quantize {name}: no linear layer has inputs that are a multiple of its blocks; choose int8",
    )
    linear = [path for path, module in model.named_modules() if type(module) is nn.Linear and ".lora_" not in path]
    if linear:
        reason = "because their inputs are no multiple of its blocks"
        typer.echo(
            f"--quantize {name}: {len(linear)} linear layers stay as they are, {reason}: {linear[0]} …", err=True
        )
    pack_weights(model)


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
    from regard.cli.speculation_options import open_drafter
    from regard.engine.engine import Engine
    from regard.engine.inputs import decoder_of
    from regard.engine.memory import divided_share

    device = next(decoder_of(llm.model).parameters()).device
    parallel = options.tensor_parallel > 1
    compiles = RUNS_EAGERLY if parallel else choose_compile(options.compile, device, options.cache, options.speculate)
    if compiles.value == "on":
        console.print("compiling the decode step …", highlight=False)
    memory = divided_share(options.memory, index, engines, device) if engines > 1 else options.memory
    if parallel:
        from regard.cli.tensor_parallel import open_parallel_engine, stop_server

        assert path is not None, "the other processes load the model too"
        open_parallel_engine(
            path, llm, options.tensor_parallel, options.adapter, options.dtype, stop_server, rows=options.rows,
            capacity=options.context, memory=memory, queue=options.queue,
        )  # fmt: skip
    else:
        llm.engine = Engine(
            llm.model, rows=options.rows, capacity=options.context, source_capacity=options.context, memory=memory,
            queue=options.queue, compile=compiles.value == "on", max_cpu_loras=options.max_cpu_loras,
            max_loras=options.max_loras, batch_invariant=options.batch_invariant, cache=options.cache,
            speculation=open_drafter(
                options.speculate, path, options.device, options.dtype, options.compile, options.draft_chains
            ),
            draft_tokens=options.draft_tokens,
        )  # fmt: skip
        llm.rows = llm.engine.store.rows
    warm_up(llm.engine, console)
    runner = llm.engine.runner
    if compiles.value == "on" and not runner.has_cpu_step and runner.graphs is None:
        compiles = EngineChoice("compile", "off", "torch cannot compile this model; its warning says why")
    print_choices(engine_choices(llm, options, compiles, engines), console)


def engine_choices(
    llm: "LanguageModel", options: EngineOptions, compiles: EngineChoice, engines: int
) -> list[EngineChoice]:
    """The settings of the model's engine, and the option or the rule that has set each."""
    from regard.engine.inputs import decoder_of
    from regard.engine.memory import bytes_of

    engine, decoder = llm.engine, decoder_of(llm.model)
    weight = next(decoder.parameters())
    context = "the model's" if options.context is None else "--context"
    if options.context is None and engine.capacity > (decoder.spec.context or engine.capacity):
        context = "the cache does not grow with them"
    if engine.capacity < (options.context or decoder.spec.context or 0):
        context = "what the store holds"
    rows = "what this device decodes at once" if options.rows is None else "--rows"
    size, ranks = store_size(engine.store.metrics(), bytes_of(engine.store)), options.tensor_parallel
    return [
        device_choice(weight.device, options),
        dtype_choice(weight.dtype, options),
        *([EngineChoice("weights", options.quantize, "--quantize")] if options.quantize else []),
        *([EngineChoice("cache", options.cache, "--cache")] if options.cache else []),
        *([EngineChoice("drafts", options.speculate, "--speculate")] if options.speculate else []),
        EngineChoice("context", f"{engine.capacity} tokens", context),
        EngineChoice("rows", str(engine.store.rows), rows),
        EngineChoice("store", size, memory_rule(options.memory, weight.device, engines)),
        *([EngineChoice("ranks", str(ranks), "--tensor-parallel")] if ranks > 1 else []),
        EngineChoice("queue", str(engine.queue), "more requests are refused with 429"),
        compiles,
        *([EngineChoice("batch", "invariant", "--batch-invariant")] if options.batch_invariant else []),
    ]


def device_choice(device: "torch.device", options: EngineOptions) -> EngineChoice:
    return EngineChoice("device", str(device), "the GPU if there is one" if options.device == "auto" else "--device")


def dtype_choice(dtype: "torch.dtype", options: EngineOptions) -> EngineChoice:
    reason = "as stored, on a CPU at least float32" if options.dtype == "auto" else "--dtype"
    return EngineChoice("dtype", str(dtype).removeprefix("torch."), reason)


def print_choices(choices: list[EngineChoice], console: "Console") -> None:
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


def choose_compile(
    asked: bool | None, device: "torch.device", cache: str | None = None, speculate: str | None = None
) -> EngineChoice:
    from regard.cli.speculation_options import reads_hidden_states
    from regard.compat import cannot_compile
    from regard.engine.caches import parse_cache

    if asked is None and cache is not None and not parse_cache(cache).compiles:
        return EngineChoice("compile", "off", f"--cache {cache} runs eagerly")
    if asked is None and speculate is not None and reads_hidden_states(speculate):
        return EngineChoice("compile", "off", f"--speculate {speculate} runs eagerly")
    if asked is False:
        return EngineChoice("compile", "off", "--no-compile")
    if asked is None and device.type == "cpu":
        return EngineChoice("compile", "off", "a CPU starts sooner without it; --compile turns it on")
    reason = cannot_compile(device)
    if reason is not None:
        return EngineChoice("compile", "off", reason)
    return EngineChoice("compile", "on", "--compile" if asked else "this device decodes faster with it")


def memory_rule(memory: float | None, device: "torch.device", engines: int) -> str:
    from regard.engine.memory import SHARES

    available = "the memory" if device.type == "cpu" else "the free memory of the GPU"
    rule = f"--memory {memory}" if memory else f"at most {SHARES.get(device.type, 0.25)} of {available}"
    return rule if engines == 1 else f"{rule}, for {engines} models in equal parts"


def store_size(metrics: dict[str, int], size: int) -> str:
    blocks = f"{metrics['blocks']:,} blocks, " if "blocks" in metrics else ""
    return f"{blocks}at most {size / 1e9:,.2f} GB"
