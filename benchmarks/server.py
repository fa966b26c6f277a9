"""What `regard serve` adds to its engine on this CPU: 32 streams, interleaved with the engine alone in one process.

python -m benchmarks.server

SmolLM2-135M, prompts of 32 random tokens and 64 new ones, greedy. The clients read raw chunks, so that they use little
of the time of two cores.
"""

import asyncio
import json
from contextlib import ExitStack

from benchmarks.cpu_engine import Work, random_work, run_engine
from benchmarks.timing import interleave
from regard.checkpoint import load
from regard.cli.bench_serve import open_server
from regard.cli.open_engine import EngineOptions
from regard.engine.engine import Engine
from regard.find_model import locate

STREAMS, PROMPT, NEW = 32, 32, 64


async def stream(host: str, port: int, ids: list[int], new: int) -> None:
    body = {"model": "smollm2", "prompt": ids, "max_tokens": new, "temperature": 0, "ignore_eos": True, "stream": True}
    content = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(host, port)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\nconnection: close\r\n"
    writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
    received = await reader.read()
    writer.close()
    assert b"200 OK" in received[:40] and b"[DONE]" in received and received.count(b"data: ") > new // 2, received


async def stream_all(url: str, work: Work) -> None:
    host, port = url.removeprefix("http://").split(":")
    await asyncio.gather(*(stream(host, int(port), ids, new) for ids, new in work))


def main(rounds: int = 5) -> None:
    model = load(locate("smollm2"))
    seeds = iter(range(1000))  # new prompts in each round: no prefix is cached

    def work() -> Work:
        return random_work([(PROMPT, NEW)] * STREAMS, model.spec.vocab, next(seeds))

    with ExitStack() as stack:
        url = stack.enter_context(open_server("smollm2", EngineOptions()))
        engine = Engine(model, rows=STREAMS)
        candidates = {
            "engine": lambda: run_engine(engine, work()),
            "server": lambda: asyncio.run(stream_all(url, work())),
        }
        rates = interleave(candidates, rounds, STREAMS * NEW)
    print(json.dumps(rates | {"overhead": round(rates["engine"] / rates["server"] - 1, 3)}))


if __name__ == "__main__":
    main()
