"""`regard serve`: an OpenAI-compatible API for models, with a web page to chat with them and inspect them."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from regard.cli.open_engine import (
    INVARIANT_OR_QUANTIZED,
    BatchInvariantOption,
    CacheOption,
    CompileOption,
    DtypeOption,
    EngineOptions,
    MemoryOption,
    QuantizeOption,
    QueueOption,
    RowsOption,
    check_cache,
    excludes_drafts,
)
from regard.cli.open_model import AdapterOption, ContextOption, DeviceOption
from regard.cli.open_served import NamedModel, load_adapters, named_adapters, named_models, open_served
from regard.cli.serve_options import (
    AccessLogOption,
    AllowHostOption,
    AllowOriginOption,
    HostOption,
    IndexOption,
    KeyOption,
    LoraFolderOption,
    LoraModulesOption,
    MaxBodyOption,
    MaxCpuLorasOption,
    MaxLorasOption,
    NameOption,
    PortOption,
    ReplicasOption,
    RunsOption,
    ServedModelsArgument,
    split_keys,
)
from regard.cli.speculation_options import DraftChainsOption, DraftTokensOption, SpeculateOption, check_speculation
from regard.cli.tensor_parallel import TensorParallelOption

if TYPE_CHECKING:
    from rich.console import Console

    from regard.server.grounding import Grounding
    from regard.server.network_options import NetworkOptions


def serve(
    models: ServedModelsArgument,
    host: HostOption = "127.0.0.1",
    port: PortOption = 8000,
    key: KeyOption = None,
    name: NameOption = None,
    rows: RowsOption = None,
    memory: MemoryOption = None,
    queue: QueueOption = 256,
    max_body: MaxBodyOption = None,
    allow_host: AllowHostOption = None,
    allow_origin: AllowOriginOption = None,
    replicas: ReplicasOption = None,
    tensor_parallel: TensorParallelOption = 1,
    access_log: AccessLogOption = False,
    context: ContextOption = None,
    adapter: AdapterOption = None,
    lora_modules: LoraModulesOption = None,
    lora_folder: LoraFolderOption = None,
    runs: RunsOption = Path("runs"),
    index: IndexOption = None,
    max_cpu_loras: MaxCpuLorasOption = 64,
    max_loras: MaxLorasOption = 8,
    dtype: DtypeOption = "auto",
    quantize: QuantizeOption = None,
    cache: CacheOption = None,
    speculate: SpeculateOption = None,
    draft_tokens: DraftTokensOption = 5,
    draft_chains: DraftChainsOption = 1,
    compile: CompileOption = None,
    batch_invariant: BatchInvariantOption = False,
    device: DeviceOption = "auto",
) -> None:
    """Serve models over HTTP, with a web page at /.

    If there are several models, each request names its model. Every model has an engine of its own; they divide the
    memory in equal parts.

    For an encoder-decoder, the prompt of /v1/completions is the source and the completion is its output. An encoder
    has /v1/embeddings and /v1/rerank instead, a Whisper model /v1/audio/transcriptions and /v1/audio/translations.

    --adapter adds one adapter to the model for all requests. With --lora-modules, and with adapters of --lora-folder
    that are loaded by POST /v1/load_lora_adapter, each request chooses: its model is the name of an adapter.

    Routes: /v1/chat/completions, /v1/completions, /v1/responses, /v1/embeddings, /v1/rerank, /v1/models,
    /v1/audio/transcriptions, /v1/audio/translations, /v1/load_lora_adapter, /v1/unload_lora_adapter, /tokenize,
    /detokenize, /health, /ready, /metrics, and for inspection /regard/model, /regard/tokenize, /regard/heads,
    /regard/attention/overview, /regard/attention/head, /regard/spec, /regard/lens, /regard/patch.

    With --index, the last question of a chat is searched for in documents. What is found goes before the question, and
    the response lists the `sources` and those that the answer cites; "search": false in a request leaves it out.

    The page also shows the training runs in the folder --runs (/regard/runs), and can train the demo there. Its models
    can be loaded and removed while the server runs (/regard/models), by clients on this machine or with a key.

    \b
    Examples:
      regard serve runs/demo
      regard serve smollm2 --rows 32 --context 2048 --compile
      regard serve smollm2 --quantize int8
      regard serve smollm2 --cache int8
      regard serve smollm2 --speculate ngram
      regard serve chat=smollm2 minilm
      regard serve smollm2 --lora-modules pirate=runs/pirate --lora-modules legal=adapters/legal
      regard serve smollm2 --index docs.index
      regard serve smollm2 --replicas 4
      regard serve runs/demo --runs ~/experiments/runs
      regard serve models/llama-8b --tensor-parallel 2
      regard serve models/llama-8b --batch-invariant
      regard serve runs/demo --allow-origin https://app.example --access-log
      REGARD_KEY=secret regard serve runs/demo --host 0.0.0.0 --port 9000
    """
    named = named_models(models, name)  # before torch and the server are imported: a mistyped name is refused at once
    loras = named_adapters(lora_modules or [], named)
    options = EngineOptions(
        device=device, context=context, adapter=adapter, dtype=dtype, rows=rows, memory=memory, queue=queue,
        compile=compile, max_cpu_loras=max_cpu_loras, max_loras=max_loras, tensor_parallel=tensor_parallel,
        batch_invariant=batch_invariant, quantize=quantize, cache=cache,
        speculate=speculate, draft_tokens=draft_tokens, draft_chains=draft_chains,
    )  # fmt: skip
    check_combination(named, options, loras, lora_folder, replicas)
    if index is not None and replicas is not None:
        raise ValueError("--index does not support --replicas; leave one of them out")
    require_server()
    from rich.console import Console

    from regard.server.network_options import NetworkOptions

    network = NetworkOptions(
        host=host, port=port, keys=split_keys(key), allow_hosts=tuple(allow_host or ()),
        allow_origins=tuple(allow_origin or ()), access_log=access_log, max_body=max_body,
    )  # fmt: skip
    console = Console(stderr=True, soft_wrap=True)
    if replicas is not None:
        from regard.cli.serve_replicas import run_replicas

        announce = partial(print_address, console, named)
        return run_replicas(named, loras, options, network, replicas, console, announce)
    serve_in_process(named, loras, options, network, lora_folder, runs, index, console)


def serve_in_process(
    models: list[NamedModel],
    loras: dict[str, Path],
    options: EngineOptions,
    network: "NetworkOptions",
    lora_folder: Path | None,
    runs: Path,
    index: Path | None,
    console: "Console",
) -> None:
    """Serve the models in this process, with the runs of a folder, and models that are loaded while it runs."""
    from regard.cli.model_library import ModelLibrary
    from regard.cli.served_runs import ServedRuns
    from regard.server.run_server import serve as run

    grounding = None if index is None else open_grounding(index, options.device)
    served = open_served(models, console, options)
    load_adapters(served[0], loras, console)
    shown = ServedRuns(runs)
    library = ModelLibrary(models, options, shown, console) if options.tensor_parallel == 1 else None
    announce = partial(print_address, console, models)
    run(
        served, network, adapters=lora_folder, runs=shown, library=library, grounding=grounding, on_ready=announce
    )  # fmt: skip


def open_grounding(path: Path, device: str) -> "Grounding":
    """The documents of an index, for chats."""
    from regard.cli.ask import shown_path
    from regard.cli.index import embedder, open_index
    from regard.retrieval.search import search
    from regard.retrieval.sources import choose_sources
    from regard.server.grounding import CountTokens, FindSources, Grounding
    from regard.text.source_prompt import PromptSource

    def open_search() -> FindSources:
        index, encoder = open_index(path, device)
        embed = embedder(encoder)

        def find(question: str, count: CountTokens, budget: int) -> list[PromptSource]:
            hits = [hit._replace(path=shown_path(hit.path)) for hit in search(index, question, embed)]
            return choose_sources(hits, count, budget)

        return find

    return Grounding(open_search)


def require_server() -> None:
    """Raise ValueError if the packages of the server are not installed."""
    try:
        import uvicorn  # noqa: F401
    except ModuleNotFoundError:
        raise ValueError("serving needs more packages: pip install 'regard[serve]'") from None


def print_address(console: "Console", models: list[NamedModel], url: str) -> None:
    listed = ", ".join(f"[bold]{model.name}[/]" for model in models)
    console.print(f"serving {listed} on {url}  (Ctrl-C to stop)", highlight=False)


def check_combination(
    models: list[NamedModel],
    options: EngineOptions,
    loras: dict[str, Path],
    lora_folder: Path | None,
    replicas: int | None,
) -> None:
    """Raise ValueError for options that exclude each other."""
    if options.adapter is not None and len(models) > 1:
        raise ValueError("--adapter is for one model; serve the models with adapters as runs, or start another server")
    if lora_folder is not None and not lora_folder.is_dir():
        raise ValueError(f"--lora-folder {lora_folder} is not a folder; create it, or give another path")
    if options.tensor_parallel > 1 and (len(models) > 1 or replicas is not None or loras or lora_folder is not None):
        raise ValueError("--tensor-parallel is for one model, without --replicas, --lora-modules and --lora-folder")
    if options.batch_invariant and (options.tensor_parallel > 1 or loras or lora_folder is not None):
        raise ValueError("--batch-invariant does not support --tensor-parallel, --lora-modules and --lora-folder")
    if options.quantize and options.batch_invariant:
        raise ValueError(INVARIANT_OR_QUANTIZED)
    if options.quantize and (options.tensor_parallel > 1 or loras or lora_folder is not None):
        raise ValueError("--quantize does not support --tensor-parallel, --lora-modules and --lora-folder")
    check_cache(options)
    check_speculation(options.speculate, excludes_drafts(options), options.draft_chains)
    if replicas is not None and lora_folder is not None:
        raise ValueError("--lora-folder loads adapters into one replica only; give them to all with --lora-modules")
