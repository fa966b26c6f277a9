"""`regard bench serve`: latencies, throughput and errors of servers whose behaviour is known."""

import asyncio
import itertools
import json
import random
from pathlib import Path

import httpx
import pytest

from regard.cli.load_generator import Load, StreamResult, generate_load, random_bodies, summarize
from regard.engine.async_engine import AsyncEngine
from regard.engine.request import QueueFull
from tests.cli.conftest import regard
from tests.server.conftest import RunningServer, start_server, tokenizer  # noqa: F401

STEP = 0.01  # seconds


@pytest.fixture
def server(start_server) -> RunningServer:  # noqa: F811
    found = start_server(repeat=True)
    found.engine.step_seconds = STEP
    return found


def test_the_table_and_the_json_have_the_latencies(server: RunningServer) -> None:
    arguments = ("bench", "serve", server.url, "--requests", 6, "--concurrency", 2, "--prompt-tokens", "5-9")
    result = regard(*arguments, "--output-tokens", 8, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["requests"] == found["succeeded"] == 6 and found["errors"] == {}
    assert found["output_tokens"] == 6 * 8 and 6 * 5 <= found["prompt_tokens"] <= 6 * 9
    assert all(5 <= len(request.ids) <= 9 for request in server.engine.submitted)
    steps = 1000 * STEP
    assert found["ttft"]["p50"] >= steps and found["e2e"]["p50"] >= 8 * steps
    assert 0 < found["tpot"]["p50"] <= found["e2e"]["p50"] / 7 and found["itl"]["p99"] > 0
    assert found["e2e"]["p50"] <= found["e2e"]["p90"] <= found["e2e"]["p99"]
    assert found["output_tokens_per_second"] == pytest.approx(48 / found["seconds"])
    assert found["seconds"] >= 3 * 8 * STEP  # three after each other
    printed = regard(*arguments, "--output-tokens", 4).stdout
    assert "time to first token" in printed and "p99" in printed and "6 of 6 requests" in printed


def test_outputs_have_the_lengths_that_were_asked_for(start_server) -> None:  # noqa: F811
    server = start_server("a short reply")
    arguments = ("bench", "serve", server.url, "--requests", 3, "--prompt-tokens", 4, "--output-tokens", 50, "--json")
    assert json.loads(regard(*arguments).stdout)["output_tokens"] == 3 * 50


def test_bodies_of_a_file_are_sent_in_turn(server: RunningServer, tmp_path: Path) -> None:
    message = {"messages": [{"role": "user", "content": "Where is the lamp?"}], "max_tokens": 3}
    lines = [message, {"custom_id": "1", "body": {"prompt": "Mira", "max_tokens": 2}}]
    (tmp_path / "bodies.jsonl").write_text("\n".join(map(json.dumps, lines)))
    arguments = ("bench", "serve", f"{server.url}/v1/", "--requests", 4, "--concurrency", 1, "--json")
    found = json.loads(regard(*arguments, "--file", tmp_path / "bodies.jsonl").stdout)
    assert found["succeeded"] == 4 and found["output_tokens"] == 10
    assert [request.sampling.max_new for request in server.engine.submitted] == [3, 2, 3, 2]


def test_errors_are_counted_by_status(start_server, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    server = start_server(queue=2, repeat=True)
    server.engine.may_step.clear()
    refusals, check = itertools.count(1), AsyncEngine.check_queue

    def step_after_ten_refusals(self: AsyncEngine, count: int) -> None:
        try:
            check(self, count)
        except QueueFull:
            if next(refusals) == 10:
                server.engine.may_step.set()
            raise

    monkeypatch.setattr(AsyncEngine, "check_queue", step_after_ten_refusals)
    arguments = ("bench", "serve", server.url, "--requests", 12, "--concurrency", 12, "--output-tokens", 9)
    found = json.loads(regard(*arguments, "--prompt-tokens", 4, "--json").stdout)
    assert found["succeeded"] == 2 and found["errors"] == {"429": 10}
    refused = regard(*arguments, "--prompt-tokens", 100_000)
    assert isinstance(refused.exception, ValueError) and "no request succeeded: 400 (12)" in str(refused.exception)
    assert "does not answer as an OpenAI" in str(regard("bench", "serve", "http://127.0.0.1:9").exception)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--prompt-tokens", "9-5"), "--prompt-tokens='9-5' must be a positive number, or a range"),
        (("--output-tokens", "many"), "--output-tokens='many' must be"),
        (("--output-tokens", "٣٢"), "--output-tokens='٣٢' must be"),
        (("--file", "{folder}/empty"), "is empty"),
        (("--file", "{folder}/wrong"), "line 2: not a JSON object with either prompt or messages"),
    ],
)
def test_wrong_options_are_refused(options: tuple[str, ...], message: str, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    (tmp_path / "wrong").write_text('{"prompt": "a"}\n{"prompt": "a", "messages": []}\n')
    refused = regard("bench", "serve", "http://127.0.0.1:9", *(option.format(folder=tmp_path) for option in options))
    assert isinstance(refused.exception, ValueError) and message in str(refused.exception)


def answer(request: httpx.Request) -> httpx.Response:
    event = {"choices": [{"text": "a"}], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}
    return httpx.Response(200, text=f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n")


def run(load: Load) -> tuple[list[StreamResult], float]:
    async def main() -> tuple[list[StreamResult], float]:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://test") as client:
            return await generate_load(client, itertools.repeat({"prompt": "a"}), load)

    return asyncio.run(main())


def test_requests_arrive_as_a_poisson_process() -> None:
    draw = random.Random(3)
    arrivals = list(itertools.accumulate(draw.expovariate(200) for _ in range(60)))
    results, seconds = run(Load(requests=60, duration=None, concurrency=None, rate=200, seed=3))
    assert len(results) == 60 and seconds >= arrivals[-1]
    limited, seconds = run(Load(requests=None, duration=0.2, concurrency=4, rate=200, seed=3))
    assert seconds >= 0.2 and 1 <= len(limited) <= sum(arrival < 0.25 for arrival in arrivals)


def test_random_prompts_share_a_prefix() -> None:
    bodies = list(itertools.islice(random_bodies((20, 30), (1, 5), 10, 50, seed=1), 9))
    assert len({tuple(body["prompt"][:10]) for body in bodies}) == 1
    assert len({tuple(body["prompt"]) for body in bodies}) == 9
    assert all(20 <= len(b["prompt"]) <= 30 and max(b["prompt"]) < 50 and 1 <= b["max_tokens"] <= 5 for b in bodies)
    words = next(random_bodies((4, 4), (1, 1), 0, None, seed=1))["prompt"]
    assert len(words.split()) == 4


def test_percentiles_are_those_of_the_successful_requests() -> None:
    times = [StreamResult(chunks=[0.001 * i, 0.001 * i + 0.5], seconds=0.001 * i, output_tokens=6) for i in range(101)]
    found = summarize([*times, StreamResult(error="503", seconds=99.0)], 10.0)
    assert found["ttft"] == pytest.approx({"mean": 50, "p50": 50, "p90": 90, "p99": 99})
    assert found["tpot"]["p50"] == pytest.approx(100) and found["itl"]["mean"] == pytest.approx(500)
    assert found["errors"] == {"503": 1} and found["requests_per_second"] == pytest.approx(10.1)
    assert summarize([], 1.0)["ttft"] is None


def test_a_model_is_served_meanwhile(demo_run: Path) -> None:
    arguments = ("--requests", 3, "--prompt-tokens", 8, "--output-tokens", 4, "--json")
    result = regard("bench", "serve", demo_run, *arguments)
    assert json.loads(result.stdout)["succeeded"] == 3 and "serving" in result.stderr


def test_a_model_is_served_with_the_given_options(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def start(command: list[str], **_: object) -> None:
        started.append(command)
        raise OSError("not started")

    monkeypatch.setattr("regard.cli.bench_serve.subprocess.Popen", start)
    options = (
        "--quantize", "int8", "--cache", "int4:8", "--speculate", "self", "--draft-tokens", "3", "--draft-chains", "2",
    )  # fmt: skip
    assert "not started" in str(regard("bench", "serve", "smollm2", *options).exception)
    pairs = set(zip(started[0], started[0][1:], strict=False))
    assert set(zip(options[::2], options[1::2], strict=True)) <= pairs


def test_options_of_an_engine_are_refused_for_an_address() -> None:
    refused = str(regard("bench", "serve", "http://127.0.0.1:9", "--cache", "int8").exception)
    assert "--cache" in refused and "give a model instead" in refused
    assert "there is no cache 'int'" in str(regard("bench", "serve", "smollm2", "--cache", "int").exception)
