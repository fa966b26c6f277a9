"""`regard bench serve`: measure the latency and throughput of a server under load."""

import itertools
import json
import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.open_engine import CacheOption, EngineOptions, QuantizeOption, check_cache
from regard.cli.speculation_options import DraftChainsOption, DraftTokensOption, SpeculateOption, check_speculation
from regard.find_model import find_model

if TYPE_CHECKING:
    from rich.console import Console

    from regard.cli.load_generator import Load

LATENCIES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "between chunks",
    "e2e": "whole response",
}
EXTRA = "the load generator needs more packages: pip install 'regard[serve]'"


def bench_serve(
    target: Annotated[
        str, typer.Argument(metavar="URL|MODEL", help="The address of a server, or a model, which is served meanwhile.")
    ],
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Requests at a time; by default 8, and with --rate not limited.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=1e-6, help="Requests per second that arrive as a Poisson process.")
    ] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="Requests to send; by default 64.")] = None,
    duration: Annotated[float | None, typer.Option(min=0.1, help="Send requests for this many seconds.")] = None,
    prompt_tokens: Annotated[str, typer.Option(help="Tokens of a random prompt: a number or 100-1024.")] = "128",
    output_tokens: Annotated[str, typer.Option(help="New tokens of a request: a number or a range.")] = "128",
    shared_prefix: Annotated[int, typer.Option(min=0, help="First tokens that all random prompts share.")] = 0,
    file: Annotated[
        Path | None, typer.Option(help="A .jsonl file of bodies with prompt or messages, instead of random prompts.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="The model's name; by default the server's first.")] = None,
    key: Annotated[str | None, typer.Option(envvar="REGARD_KEY", help="API key of the server.")] = None,
    quantize: QuantizeOption = None,
    cache: CacheOption = None,
    speculate: SpeculateOption = None,
    draft_tokens: DraftTokensOption = 5,
    draft_chains: DraftChainsOption = 1,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds until a silent request fails.")] = 600.0,
    seed: Annotated[int, typer.Option(help="Seed of prompts, lengths and arrivals.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure the latency and throughput of an OpenAI-compatible server under load.

    Every request is streamed. Reported are the time to the first token, per output token, between chunks and of the
    whole response, requests and output tokens per second, and errors by status.

    \b
    Examples:
      regard bench serve http://127.0.0.1:8000 --concurrency 32 --requests 256
      regard bench serve http://127.0.0.1:8000 --rate 4 --duration 60 --prompt-tokens 100-1024
      regard bench serve smollm2 --requests 16 --output-tokens 32 --json
      regard bench serve smollm2 --quantize int8 --cache int8 --speculate ngram
    """
    is_url = target.startswith(("http://", "https://"))
    options = EngineOptions(
        quantize=quantize, cache=cache, speculate=speculate, draft_tokens=draft_tokens, draft_chains=draft_chains
    )
    check_server_options(options, is_url)
    if not is_url:
        find_model(target)  # before slow imports: a mistyped name is refused at once
    lengths = parse_range("--prompt-tokens", prompt_tokens), parse_range("--output-tokens", output_tokens)
    bodies = None if file is None else itertools.cycle(read_bodies(file))
    try:
        import httpx  # noqa: F401
    except ModuleNotFoundError:
        raise ValueError(EXTRA) from None
    import asyncio

    from rich.console import Console

    from regard.cli.load_generator import Load

    if requests is None and duration is None:
        requests = 64
    load = Load(requests, duration, concurrency or (None if rate is not None else 8), rate, seed)
    console = Console(stderr=True, soft_wrap=True)
    with open_server(target, options) if not is_url else as_given(target) as url:
        found = asyncio.run(measure(url, bodies, lengths, shared_prefix, load, name, key, timeout, console))
    if not found["succeeded"]:
        errors = ", ".join(f"{code} ({count})" for code, count in found["errors"].items())
        raise ValueError(f"no request succeeded: {errors or 'none was sent'}")
    if as_json:
        print(json.dumps(found))
    else:
        print_table(found)


async def measure(
    url: str, bodies: Any, lengths: Any, shared: int, load: "Load", name: str | None, key: str | None, timeout: float,
    console: "Console",
) -> dict[str, Any]:  # fmt: skip
    import httpx
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    from regard.cli.load_generator import generate_load, random_bodies, summarize

    headers = {"authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=timeout, limits=limits) as client:
        try:
            models = await client.get("/v1/models")
            models.raise_for_status()
            name = name or models.json()["data"][0]["id"]
            described = await client.get("/regard/model")  # other servers have no such route
        except (httpx.HTTPError, ValueError, LookupError) as error:
            raise ValueError(f"{url} does not answer as an OpenAI-compatible server: {error}") from None
        vocabulary = described.json()["vocabulary"] if described.status_code == 200 else None
        bodies = bodies or random_bodies(*lengths, shared, vocabulary, load.seed)
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            task = progress.add_task("", total=load.requests)
            results, seconds = await generate_load(
                client, ({"model": name} | body for body in bodies), load, lambda result: progress.advance(task)
            )
    return summarize(results, seconds)


@contextmanager
def as_given(url: str) -> Generator[str]:
    yield url.rstrip("/").removesuffix("/v1")


def server_options(options: EngineOptions) -> dict[str, str]:
    """The given options of the server that is measured."""
    given = {"--quantize": options.quantize, "--cache": options.cache, "--speculate": options.speculate}
    return {name: value for name, value in given.items() if value is not None}


def check_server_options(options: EngineOptions, is_url: bool) -> None:
    if is_url and (given := server_options(options)):
        raise ValueError(f"{', '.join(given)}: the server at this address has its own options; give a model instead")
    check_cache(options)
    check_speculation(options.speculate, excluded=False, draft_chains=options.draft_chains)


@contextmanager
def open_server(model: str, options: EngineOptions) -> Generator[str]:
    """`regard serve` on a free port, with these options; its messages are printed."""
    command = [sys.executable, "-m", "regard", "serve", model, "--port", "0"]
    command += ["--draft-tokens", str(options.draft_tokens), "--draft-chains", str(options.draft_chains)]
    for name, value in server_options(options).items():
        command += [name, value]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        messages = server.stderr
        assert messages is not None

        def lines() -> Generator[str]:
            for line in messages:
                print(line, end="", file=sys.stderr)
                yield line

        try:
            url = next((found[0] for line in lines() if (found := re.search(r"http://[\w.]+:\d+", line))), None)
            if url is None:
                raise ValueError("the server did not start; its message is above")
            # a full pipe would block the server
            threading.Thread(target=lambda: deque(lines(), maxlen=0), daemon=True).start()
            yield url
        finally:
            server.terminate()


def parse_range(option: str, text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", text)
    low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= low <= high:
        raise ValueError(f"{option}={text!r} must be a positive number, or a range such as 100-1024")
    return low, high


def read_bodies(path: Path) -> list[dict[str, Any]]:
    """The bodies of a file: objects with `prompt` or `messages`, or lines of `regard batch`."""
    bodies = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            entry = json.loads(line)
            body = entry.get("body", entry)
            if ("prompt" in body) == ("messages" in body):
                raise ValueError
        except (ValueError, AttributeError, TypeError):
            raise ValueError(f"{path}, line {number}: not a JSON object with either prompt or messages") from None
        bodies.append(body)
    if not bodies:
        raise ValueError(f"{path} is empty; write one body per line")
    return bodies


def print_table(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    columns = ("mean", "p50", "p90", "p99")
    table = Table("milliseconds", *columns, box=None)
    for key, label in LATENCIES.items():
        values = found[key] or {}
        table.add_row(label, *(f"{values[column]:,.1f}" if values else "-" for column in columns))
    console.print(table)
    console.print(
        f"{found['succeeded']} of {found['requests']} requests in {found['seconds']:.1f} s: "
        f"{found['requests_per_second']:.2f} requests/s, {found['output_tokens_per_second']:,.1f} output tokens/s "
        f"({found['prompt_tokens']:,} prompt and {found['output_tokens']:,} output tokens)"
    )
    for code, count in found["errors"].items():
        console.print(f"[red]{count} failed: {code}[/]")
