"""Ten times the load that a server can answer: a bounded queue, refusals at once, flat memory, and /health answers."""

import asyncio
import json
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import httpx
import pytest

from tests.server.conftest import wait_until
from tests.server.server_process import children, open_sockets, resident_bytes, save_tiny, serve_process

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
BODY = {"model": "tiny", "prompt": "Mira", "max_tokens": 100, "ignore_eos": True}
ROWS, QUEUE = 4, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@dataclass
class Measured:
    answered: list[float] = field(default_factory=list)  # seconds
    refused: list[float] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)  # requests in the queue
    resident: list[int] = field(default_factory=list)  # bytes


async def request(client: httpx.AsyncClient, measured: Measured, body: dict = BODY) -> float:
    begin = time.monotonic()
    response = await client.post("/v1/completions", json=body)
    seconds = time.monotonic() - begin
    if response.status_code == 429:
        assert response.headers["retry-after"]
        measured.refused.append(seconds)
    else:
        assert response.json()["usage"]["completion_tokens"] == body["max_tokens"]
        measured.answered.append(seconds)
    return seconds


async def watch(client: httpx.AsyncClient, measured: Measured, process) -> None:
    """Ask for the health ten times a second, and for the queue and the memory once."""
    for i in range(10**9):
        begin = time.monotonic()
        assert (await client.get("/health")).status_code == 200
        measured.health.append(time.monotonic() - begin)
        if i % 10 == 0:
            measured.waiting.append(gauge((await client.get("/metrics")).text, "waiting"))
            measured.resident.append(resident_bytes(process))
        await asyncio.sleep(0.1)


def gauge(metrics: str, name: str) -> int:
    line = next(line for line in metrics.splitlines() if line.startswith(f"regard_engine_{name}"))
    return int(float(line.split()[-1]))


async def overload(url: str, process, seconds: float, seconds_each: float) -> tuple[float, Measured]:
    """Requests per second that the server answers, and what is measured at ten times that rate.

    seconds_each: so long are the outputs that the server computes one in this time.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        tokens = int(100 * seconds_each / await request(client, Measured()))
        body = BODY | {"max_tokens": min(max(tokens, 30), 1000)}
        begin = time.monotonic()
        await asyncio.gather(*(request(client, Measured(), body) for _ in range(2 * ROWS)))
        rate = 2 * ROWS / (time.monotonic() - begin)
        measured = Measured()
        watching = asyncio.create_task(watch(client, measured, process))
        begin, tasks = time.monotonic(), []
        while (elapsed := time.monotonic() - begin) < seconds or len(tasks) < 5 * (ROWS + QUEUE):
            missing = int(10 * rate * elapsed) - len(tasks)
            tasks += [asyncio.create_task(request(client, measured, body)) for _ in range(missing)]
            await asyncio.sleep(0.01)
        await asyncio.gather(*tasks)
        watching.cancel()
        metrics = (await client.get("/metrics")).text
        assert gauge(metrics, "running") == gauge(metrics, "waiting") == 0
        assert gauge(metrics, "free_blocks") == gauge(metrics, "blocks")
    return rate, measured


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


@pytest.mark.parametrize(("seconds", "seconds_each"), [(2, 0.3), pytest.param(60, 1.5, marks=pytest.mark.slow)])
def test_ten_times_the_load(folder: Path, seconds: float, seconds_each: float, record_property) -> None:
    with serve_process(folder, "--rows", str(ROWS), "--queue", str(QUEUE)) as (process, url):
        sockets = open_sockets(process)
        httpx.post(f"{url}/v1/completions", json=BODY, timeout=60)  # the first request imports modules
        rate, measured = asyncio.run(overload(url, process, seconds, seconds_each))
        wait_until(lambda: open_sockets(process) == sockets)
    for name in ("answered", "refused", "health"):
        values = getattr(measured, name)
        record_property(name, {"count": len(values), "p50": percentile(values, 0.5), "p99": percentile(values, 0.99)})
    record_property("requests per second without overload", rate)
    record_property("resident bytes", [measured.resident[0], measured.resident[-1]])
    assert len(measured.refused) > len(measured.answered) > 0
    assert max(measured.waiting) <= QUEUE
    assert median(measured.refused) < median(measured.answered) / 2
    assert median(measured.health) < median(measured.answered) / 4 and max(measured.health) < 10
    later = measured.resident[len(measured.resident) // 3 :]
    assert max(later) - later[0] < 16 << 20


@pytest.mark.slow
@pytest.mark.parametrize("signals", [1, 2])
def test_a_signal_ends_the_process_and_every_stream(folder: Path, signals: int) -> None:
    """One signal drains: every stream ends with its last event. A second one ends the process at once."""
    with serve_process(folder, "--rows", "2") as (process, url):
        endings: list[list[str]] = []
        started = threading.Semaphore(0)

        def read() -> None:
            lines = []
            try:
                with httpx.stream(
                    "POST", f"{url}/v1/completions", json=BODY | {"stream": True}, timeout=60
                ) as response:
                    for line in response.iter_lines():
                        lines += [line] if line else []
                        if len(lines) == 1:
                            started.release()
            except httpx.RemoteProtocolError:
                lines.append("cut")
            endings.append(lines)

        threads = [threading.Thread(target=read) for _ in range(6)]
        for thread in threads:
            thread.start()
        for _ in range(2):
            assert started.acquire(timeout=60)
        while gauge(httpx.get(f"{url}/metrics", timeout=60).text, "waiting") + 2 + len(endings) < 6:
            time.sleep(0.01)  # until all requests are accepted: two are running or have ended
        for _ in range(signals):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
        assert not children(process)
        status = process.wait(timeout=60)
        for thread in threads:
            thread.join()
    assert status in (0, -signal.SIGTERM) and len(endings) == 6
    if signals == 1:
        for lines in endings:
            assert lines[-1] == "data: [DONE]"
            assert json.loads(lines[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
