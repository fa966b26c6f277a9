"""`regard batch`: answer a file of requests in the format of OpenAI's Batch API."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.batch_files import BatchOutput, BatchRequest, read_requests
from regard.cli.open_engine import (
    INVARIANT_OR_QUANTIZED,
    BatchInvariantOption,
    CacheOption,
    CompileOption,
    DtypeOption,
    EngineOptions,
    MemoryOption,
    QuantizeOption,
    RowsOption,
    check_cache,
    excludes_drafts,
)
from regard.cli.open_model import AdapterOption, ContextOption, DeviceOption, ModelArgument
from regard.cli.open_served import NamedModel, named_model, open_served
from regard.cli.speculation_options import DraftChainsOption, DraftTokensOption, SpeculateOption, check_speculation

if TYPE_CHECKING:
    from fastapi import FastAPI

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
MAX_BODY = 1 << 26  # bytes
ENCODER_REQUESTS = 8  # at a time
RETRY = 0.05  # seconds until a request that found the queue full is sent again


def batch(
    model: ModelArgument,
    requests: Annotated[Path, typer.Argument(metavar="IN", help="A .jsonl file of requests.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The .jsonl file of results; it is continued.")],
    name: Annotated[str | None, typer.Option(help="The model's name in requests; by default the folder's.")] = None,
    rows: RowsOption = None,
    memory: MemoryOption = None,
    context: ContextOption = None,
    adapter: AdapterOption = None,
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
    """Answer a file of requests in the format of OpenAI's Batch API, in continuous batches.

    Each line of IN has a custom_id, the method POST, a url (/v1/chat/completions, /v1/completions or /v1/embeddings)
    and a body, in which the model may be omitted. Each line of OUT has the custom_id and the response. A request that
    is refused has a response with its status and the reason; the others are not affected. After an interruption, the
    same command continues with the requests that have no result yet.

    The exit code is 1 if OUT has failed requests, also those of an earlier run. To repeat them, remove their lines from
    OUT and run the same command again.

    \b
    Examples:
      regard batch smollm2 requests.jsonl results.jsonl
      regard batch runs/demo requests.jsonl results.jsonl --rows 32
      regard batch smollm2 requests.jsonl results.jsonl --quantize int8 --cache int8
    """
    if batch_invariant and quantize:
        raise ValueError(INVARIANT_OR_QUANTIZED)
    named = named_model(str(model), name)  # before torch is imported: a mistyped name is refused at once
    entries = read_requests(requests)
    try:
        import fastapi  # noqa: F401
        import httpx  # noqa: F401
    except ModuleNotFoundError:
        raise ValueError("batches need more packages: pip install 'regard[serve]'") from None
    from rich.console import Console

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    options = EngineOptions(
        device, context, adapter, dtype, rows, memory, compile=compile, batch_invariant=batch_invariant,
        quantize=quantize, cache=cache, speculate=speculate, draft_tokens=draft_tokens, draft_chains=draft_chains,
    )  # fmt: skip
    check_cache(options)
    check_speculation(options.speculate, excludes_drafts(options), draft_chains)
    with BatchOutput(out, {entry.custom_id for entry in entries}) as output:
        missing = [entry for entry in entries if entry.custom_id not in output.done]
        if output.done:
            console.print(f"{out} has {len(output.done)} of {len(entries)} results already")
        if missing:
            answer_missing(missing, named, output, options, console)
        if output.failed:
            ids = ", ".join(map(repr, output.failed[:3])) + (" …" if len(output.failed) > 3 else "")
            failed = f"{len(output.failed)} of {len(entries)} requests failed"
            remedy = "to repeat them, remove their lines there and run the same command again"
            console.print(f"{failed} (custom_id {ids}); the reasons are in {out}; {remedy}", markup=False)
            raise typer.Exit(1)


def answer_missing(
    requests: list[BatchRequest], model: NamedModel, output: BatchOutput, options: EngineOptions, console: Any
) -> None:
    """Open the model, and write the responses to these requests."""
    import asyncio  # a tenth of the start of the command line

    (served,) = open_served([model], console, options)

    from regard.server.app import create_app
    from regard.server.network_options import NetworkOptions

    at_once = ENCODER_REQUESTS if served.engine is None else 2 * served.engine.engine.store.rows
    app = create_app([served], NetworkOptions(max_body=MAX_BODY))
    asyncio.run(answer_all(requests, app, model.name, output, at_once, console))


async def answer_all(
    requests: list[BatchRequest], app: "FastAPI", name: str, output: BatchOutput, at_once: int, console: Any
) -> None:
    """Answer all requests, `at_once` at a time."""
    import asyncio

    import httpx
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    start, tokens = time.perf_counter(), 0
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeElapsedColumn())
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    waiting = iter(requests)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=None) as client,
    ):
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            task = progress.add_task("", total=len(requests), rate="")

            async def work() -> None:
                nonlocal tokens
                for request in waiting:
                    status, id, body = await send(client, request, name)
                    output.write(request.custom_id, status, id, body)
                    usage = body.get("usage") if isinstance(body, dict) else None
                    tokens += (usage or {}).get("completion_tokens", 0)
                    rate = tokens / (time.perf_counter() - start)
                    progress.update(task, advance=1, rate=f"{rate:,.1f} tokens/s")

            workers = [asyncio.create_task(work()) for _ in range(min(at_once, len(requests)))]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()
        console.print(f"{len(requests)} requests, {tokens / (time.perf_counter() - start):,.1f} new tokens/s")


async def send(client: Any, request: BatchRequest, name: str) -> tuple[int, str | None, Any]:
    """The status, the id and the body of the response to a request."""
    import asyncio

    if reason := refusal(request):
        error = {"message": reason, "type": "invalid_request_error", "param": None, "code": "invalid_request"}
        return 400, None, {"error": error}
    # json.dumps, unlike httpx, encodes NaN and lone surrogates, which the server refuses
    content, headers = json.dumps({"model": name} | request.body), {"content-type": "application/json"}
    while True:
        response = await client.post(request.url, content=content, headers=headers)
        if response.status_code != 429:
            break
        await asyncio.sleep(RETRY)  # other requests of this batch fill the queue
    return response.status_code, response.headers.get("x-request-id"), response.json()


def refusal(request: BatchRequest) -> str | None:
    """Why a request cannot be part of a batch; None if it can."""
    if request.method != "POST":
        return f"method={request.method!r} must be POST"
    if request.url not in URLS:
        return f"url={request.url!r} must be one of {', '.join(URLS)}"
    if not isinstance(request.body, dict):
        return "body must be a JSON object"
    if request.body.get("stream"):
        return "a batch has no streams; remove stream from the body"
    return None
