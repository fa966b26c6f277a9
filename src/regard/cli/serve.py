"""`regard serve`: an OpenAI-compatible API for models, with a web page to chat with them and inspect them."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from regard.cli.open_engine import CompileOption, DtypeOption, EngineOptions, MemoryOption, QueueOption, RowsOption
from regard.cli.open_model import AdapterOption, ContextOption, DeviceOption
from regard.cli.open_served import TEXT_BODY, default_max_body, load_adapters, named_adapters, named_models, open_served
from regard.cli.tensor_parallel import TensorParallelOption


def serve(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="Runs, model folders, GGUF files, names that `regard models` lists; NAME=MODEL names one in the API.",
        ),
    ],
    host: Annotated[
        str, typer.Option(help="Address to listen on; any other than 127.0.0.1 requires a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 selects a free port.")] = 8000,
    key: Annotated[
        list[str] | None,
        typer.Option(
            help="API key that clients must send; safer in the environment variable REGARD_KEY than here. Several, "
            "repeated or separated by commas: requests of different keys are served equally, and share no cached "
            "prefixes.",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="The name of a single model in the API; by default the folder's.")
    ] = None,
    rows: RowsOption = None,
    memory: MemoryOption = None,
    queue: QueueOption = 256,
    max_body: Annotated[
        int | None,
        typer.Option(min=1024, help="Largest body of a request in bytes; by default 1 MiB, with images 16 MiB."),
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="A host name by which clients may call the server; can be repeated.")
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(help="An origin (https://app.example) whose pages may call the server; can be repeated."),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(min=1, help="Serve by this many processes on Ray, each with all models."),
    ] = None,
    tensor_parallel: TensorParallelOption = 1,
    access_log: Annotated[bool, typer.Option("--access-log", help="Write a line per request to stderr.")] = False,
    context: ContextOption = None,
    adapter: AdapterOption = None,
    lora: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PATH", help="An adapter that requests name as their model; can be repeated, and mixed."
        ),
    ] = None,
    adapters: Annotated[
        Path | None,
        typer.Option(help="A folder of adapters that clients may load and unload at run time."),
    ] = None,
    max_adapters: Annotated[int, typer.Option(min=1, help="Adapters that may be loaded per model.")] = 64,
    adapter_slots: Annotated[
        int, typer.Option(min=1, help="Adapters that run at the same time; requests with others wait.")
    ] = 8,
    dtype: DtypeOption = "auto",
    compile: CompileOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Serve models over HTTP, with a web page at /.

    Each request names its model. Every model has an engine of its own; they divide the memory in equal parts.

    For an encoder-decoder, the prompt of /v1/completions is the source and the completion is its output. An encoder
    has /v1/embeddings and /v1/rerank instead.

    --adapter adds one adapter to the model for all requests. With --lora, and with adapters that are loaded by POST
    /v1/load_lora_adapter, each request chooses: its model is the name of an adapter.

    Routes: /v1/chat/completions, /v1/completions, /v1/responses, /v1/embeddings, /v1/rerank, /v1/models, /tokenize,
    /detokenize, /health, /ready, /metrics, and for inspection /regard/model, /regard/tokenize, /regard/attention.

    \b
    Examples:
      regard serve runs/demo
      regard serve smollm2 --rows 32 --context 2048 --compile
      regard serve chat=smollm2 minilm
      regard serve smollm2 --lora pirate=runs/pirate --lora legal=adapters/legal
      regard serve smollm2 --replicas 4
      regard serve models/llama-8b --tensor-parallel 2
      regard serve runs/demo --allow-origin https://app.example --access-log
      REGARD_KEY=secret regard serve runs/demo --host 0.0.0.0 --port 9000
    """
    named = named_models(models, name)  # before torch and the server are imported: a mistyped name is refused at once
    if adapter is not None and len(named) > 1:
        raise ValueError("--adapter is for one model; serve the models with adapters as runs, or start another server")
    loras = named_adapters(lora or [], named)
    if adapters is not None and not adapters.is_dir():
        raise ValueError(f"--adapters {adapters} is not a folder; create it, or give another path")
    if tensor_parallel > 1 and (len(named) > 1 or replicas is not None or loras or adapters is not None):
        raise ValueError("--tensor-parallel is for one model, without --replicas, --lora and --adapters")
    if replicas is not None and adapters is not None:
        raise ValueError("--adapters loads adapters into one replica only; give them to all with --lora")
    try:
        import uvicorn  # noqa: F401
    except ModuleNotFoundError:
        raise ValueError("serving needs more packages: pip install 'regard[serve]'") from None
    from rich.console import Console

    from regard.server.run_server import is_local
    from regard.server.run_server import serve as run

    # Not by typer, which splits a variable of several values at spaces, so that each word of a key would be one.
    given = key or [os.environ.get("REGARD_KEY", "")]
    keys = [part.strip() for value in given for part in value.split(",") if part.strip()]
    is_local(host, keys)  # refused before the models are loaded
    console = Console(stderr=True, soft_wrap=True)
    options = EngineOptions(
        device, context, adapter, dtype, rows, memory, queue, compile, max_adapters, adapter_slots, tensor_parallel
    )  # fmt: skip

    def announce(url: str) -> None:
        listed = ", ".join(f"[bold]{model.name}[/]" for model in named)
        console.print(f"serving {listed} on {url}  (Ctrl-C to stop)", highlight=False)

    network: dict[str, Any] = {
        "host": host, "port": port, "key": keys, "allow_hosts": tuple(allow_host or ()),
        "allow_origins": tuple(allow_origin or ()), "access_log": access_log, "on_ready": announce,
    }  # fmt: skip
    if replicas is not None:
        from regard.cli.serve_replicas import run_replicas

        return run_replicas(named, loras, replicas, console, options, network, max_body or TEXT_BODY)
    served = open_served(named, console, options)
    load_adapters(served[0], loras, console)
    run(served, max_body=max_body or default_max_body(served), adapters=adapters, **network)
