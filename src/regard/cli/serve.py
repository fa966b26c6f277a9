"""`regard serve`: an OpenAI-compatible API for a model, with a web page to chat with it and inspect it."""

import os
from typing import Annotated

import typer

from regard.cli.open_engine import CompileOption, DtypeOption, MemoryOption, QueueOption, RowsOption
from regard.cli.open_model import AdapterOption, ContextOption, DeviceOption, ModelArgument
from regard.find_model import find_model


def serve(
    model: ModelArgument,
    host: Annotated[
        str, typer.Option(help="Address to listen on; any other than 127.0.0.1 requires a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 selects a free port.")] = 8000,
    key: Annotated[
        str | None,
        typer.Option(envvar="REGARD_KEY", help="API key that clients must send; safer in REGARD_KEY than here."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="The model's name in the API; by default the folder's.")] = None,
    rows: RowsOption = None,
    memory: MemoryOption = None,
    queue: QueueOption = 256,
    max_body: Annotated[int, typer.Option(min=1024, help="Largest body of a request in bytes.")] = 1 << 20,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="A host name by which clients may call the server; can be repeated.")
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(help="An origin (https://app.example) whose pages may call the server; can be repeated."),
    ] = None,
    access_log: Annotated[bool, typer.Option("--access-log", help="Write a line per request to stderr.")] = False,
    context: ContextOption = None,
    adapter: AdapterOption = None,
    dtype: DtypeOption = "auto",
    compile: CompileOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Serve a model over HTTP, with a web page at /.

    For an encoder-decoder, the prompt of /v1/completions is the source and the completion is its output. An encoder
    has /v1/embeddings and /v1/rerank instead.

    Routes: /v1/chat/completions, /v1/completions, /v1/responses, /v1/embeddings, /v1/rerank, /v1/models, /tokenize,
    /detokenize, /health, /ready, /metrics, and for inspection /regard/model, /regard/tokenize, /regard/attention.

    \b
    Examples:
      regard serve runs/demo
      regard serve smollm2 --rows 32 --context 2048 --compile
      regard serve runs/demo --allow-origin https://app.example --access-log
      REGARD_KEY=secret regard serve runs/demo --host 0.0.0.0 --port 9000
    """
    find_model(model)  # before torch and the server are imported: a mistyped name is refused at once
    try:
        import uvicorn  # noqa: F401
    except ModuleNotFoundError:
        raise ValueError("serving needs more packages: pip install 'regard[serve]'") from None
    from functools import partial

    from rich.console import Console

    from regard.cli.open_encoder import open_text_encoder
    from regard.cli.open_engine import open_engine
    from regard.cli.open_model import require_decoder
    from regard.lens import RecordedAttention, attention_heads
    from regard.models.encoder_decoder import EncoderDecoderModule
    from regard.server.lens_thread import Lens
    from regard.server.run_server import is_local
    from regard.server.run_server import serve as run

    is_local(host, key)  # refused before the model is loaded
    console = Console(stderr=True, soft_wrap=True)
    engine, lens, submit_source, encoder = None, None, None, None
    if (opened := open_text_encoder(model, device, context, adapter, dtype)) is not None:
        llm, encoder = opened
    else:
        llm = open_engine(
            model, console, device=device, context=context, adapter=adapter, dtype=dtype, rows=rows,
            memory=memory, queue=queue, compile=compile,
        )  # fmt: skip
        engine = llm.engine
        if isinstance(llm.model, EncoderDecoderModule):
            submit_source = llm.submit_source
        else:
            require_decoder(model, llm)
            lens = Lens(partial(RecordedAttention, llm.model), attention_heads(llm.model))
    name = name or os.path.basename(os.path.abspath(model))

    def announce(url: str) -> None:
        console.print(f"serving [bold]{name}[/] on {url}  (Ctrl-C to stop)", highlight=False)

    run(
        engine, llm.tokenizer, name, host=host, port=port, key=key, lens=lens, encoder=encoder,
        submit_source=submit_source,
        allow_hosts=tuple(allow_host or ()), allow_origins=tuple(allow_origin or ()), access_log=access_log,
        max_body=max_body, on_ready=announce,
    )  # fmt: skip
