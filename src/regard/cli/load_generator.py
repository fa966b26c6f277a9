"""Load on an OpenAI-compatible server: streamed requests at a concurrency or a rate, and their latencies.

    TTFT   time to the first token          TPOT   (last token - first token) / (tokens - 1)
    ITL    time between two chunks          E2E    time to the end of the response

Requests arrive as a Poisson process of the given rate, or as soon as one of the `concurrency` before them has ended.
"""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

WORDS = ("the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not")
PERCENTILES = (50, 90, 99)


@dataclass
class Load:
    requests: int | None  # None: until `duration`
    duration: float | None  # seconds in which requests are sent
    concurrency: int | None  # None: no limit
    rate: float | None  # requests per second; None: as many as the concurrency allows
    seed: int = 0


@dataclass
class StreamResult:
    """One request. Times are seconds from its start."""

    error: str | None = None  # a status, or the name of an exception
    chunks: list[float] = field(default_factory=list)  # times of the chunks with text
    seconds: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0


def random_bodies(
    prompt_tokens: tuple[int, int], output_tokens: tuple[int, int], shared: int, vocabulary: int | None, seed: int
) -> Iterator[dict[str, Any]]:
    """Bodies for /v1/completions with random ids, or words if the vocabulary is unknown.

    All prompts have the same first `shared` tokens. Outputs have exact lengths on servers of regard only, because
    `ignore_eos` is not in OpenAI's API.
    """
    draw = random.Random(seed)

    def tokens(count: int) -> list[Any]:
        return [draw.choice(WORDS) if vocabulary is None else draw.randrange(vocabulary) for _ in range(count)]

    prefix = tokens(shared)
    while True:
        prompt = prefix + tokens(max(1, draw.randint(*prompt_tokens) - shared))
        settings = {"max_tokens": draw.randint(*output_tokens), "temperature": 1.0, "seed": draw.randrange(1 << 31)}
        if vocabulary is None:
            yield {"prompt": " ".join(prompt), **settings}
        else:
            yield {"prompt": prompt, "ignore_eos": True, **settings}


async def generate_load(
    client: httpx.AsyncClient,
    bodies: Iterator[dict[str, Any]],
    load: Load,
    on_result: Callable[[StreamResult], None] = lambda result: None,
) -> tuple[list[StreamResult], float]:
    """The results of all requests, and the seconds from the first request to the last response."""
    draw, slots = random.Random(load.seed), asyncio.Semaphore(load.concurrency or 1 << 30)
    results: list[StreamResult] = []
    start = arrival = time.perf_counter()

    async def one(body: dict[str, Any]) -> None:
        try:
            results.append(await request(client, body))
            on_result(results[-1])
        finally:
            slots.release()

    async with asyncio.TaskGroup() as tasks:
        count = 0
        while load.requests is None or count < load.requests:
            if load.rate is not None:
                arrival += draw.expovariate(load.rate)
                await asyncio.sleep(max(0.0, arrival - time.perf_counter()))
            await slots.acquire()
            if load.duration is not None and time.perf_counter() - start >= load.duration:
                break
            tasks.create_task(one(next(bodies)))
            count += 1
    return results, time.perf_counter() - start


async def request(client: httpx.AsyncClient, body: dict[str, Any]) -> StreamResult:
    """Send a body with `messages` or a `prompt`, and measure its stream."""
    url = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    result, start = StreamResult(), time.perf_counter()
    try:
        async with client.stream("POST", url, json=body) as response:
            if response.status_code != 200:
                await response.aread()
                result.error = str(response.status_code)
            else:
                async for line in response.aiter_lines():
                    read_event(line, result, start)
    except (httpx.HTTPError, ValueError) as error:  # ValueError: an event that is not JSON
        result.error = type(error).__name__
    result.seconds = time.perf_counter() - start
    if result.error is None and not result.chunks:
        result.error = "no text"
    return result


def read_event(line: str, result: StreamResult, start: float) -> None:
    data = line.removeprefix("data:").strip()
    if not line.startswith("data:") or data == "[DONE]":
        return
    event = json.loads(data)
    if "error" in event:
        result.error = str(event["error"].get("code") or "error event")
    if usage := event.get("usage"):
        result.prompt_tokens, result.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    for choice in event.get("choices", ()):
        if choice.get("text") or (choice.get("delta") or {}).get("content"):
            result.chunks.append(time.perf_counter() - start)


def summarize(results: list[StreamResult], seconds: float) -> dict[str, Any]:
    """Counts, throughput, and the mean and percentiles of each latency in milliseconds."""
    good = [result for result in results if result.error is None]
    output = sum(result.output_tokens for result in good)
    latencies = {
        "ttft": [result.chunks[0] for result in good],
        "tpot": [(r.chunks[-1] - r.chunks[0]) / (r.output_tokens - 1) for r in good if r.output_tokens > 1],
        "itl": [after - before for r in good for before, after in zip(r.chunks, r.chunks[1:], strict=False)],
        "e2e": [result.seconds for result in good],
    }
    return {
        "requests": len(results),
        "succeeded": len(good),
        "errors": dict(Counter(result.error for result in results if result.error is not None)),
        "seconds": seconds,
        "prompt_tokens": sum(result.prompt_tokens for result in good),
        "output_tokens": output,
        "requests_per_second": len(good) / seconds,
        "output_tokens_per_second": output / seconds,
    } | {name: distribution(values) for name, values in latencies.items()}


def distribution(seconds: list[float]) -> dict[str, float] | None:
    """Mean and percentiles in milliseconds; None without values."""
    if not seconds:
        return None
    values = sorted(1000 * value for value in seconds)
    percentiles = {f"p{p}": values[round(p / 100 * (len(values) - 1))] for p in PERCENTILES}
    return {"mean": sum(values) / len(values)} | percentiles
