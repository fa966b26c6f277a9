"""The engine in its thread: disconnected clients, full queues, failed steps, shutdown."""

import json
import logging.handlers
import signal
import sys
import threading
from queue import Queue

import httpx
import pytest

from regard.engine.request import Sampling
from regard.server.app import create_app
from regard.server.run_server import Server
from regard.server.served_model import ServedModel
from tests.server.conftest import RunningServer, unanswered_post, wait_until
from tests.server.fake_engine import FakeEngine

LONG = {"model": "tiny", "prompt": "Mira", "max_tokens": 4000}


def post_in_background(server: RunningServer, responses: list, **body) -> threading.Thread:
    """Send a request in the background; its response is appended to `responses`."""

    def post() -> None:
        responses.append(httpx.post(f"{server.url}/v1/completions", json=LONG | body, timeout=60))

    thread = threading.Thread(target=post)
    thread.start()
    return thread


def test_a_disconnect_from_a_stream_frees_the_engine(start_server):
    server = start_server(repeat=True)
    server.engine.step_seconds = 0.02  # so that no request finishes before the disconnect
    with server.client.stream("POST", "/v1/completions", json=LONG | {"stream": True, "n": 3}) as response:
        next(response.iter_lines())
    wait_until(lambda: server.engine.idle)
    assert server.engine.cancelled == 3


def test_a_client_that_stops_waiting_for_its_response_frees_the_engine(start_server):
    server = start_server(repeat=True)
    server.engine.may_step.clear()
    with unanswered_post(server.url, "/v1/completions", LONG):
        wait_until(lambda: server.engine.submitted)
    wait_until(lambda: server.served.engine._inbox)  # the cancellation, which waits for the step
    server.engine.may_step.set()
    wait_until(lambda: server.engine.cancelled == 1)
    wait_until(lambda: 'status="499"} 1' in server.client.get("/metrics").text)
    wait_until(lambda: server.engine.idle)
    assert len(server.engine.submitted[0].new) < 4000


def test_a_full_queue_refuses_requests_with_429(start_server, monkeypatch):
    """At once, also while the engine is in a step, and without tokenizing the prompt."""
    server = start_server(queue=2)
    server.engine.may_step.clear()
    responses: list[httpx.Response] = []
    first = post_in_background(server, responses)
    wait_until(lambda: server.engine.submitted)
    second = post_in_background(server, responses)
    wait_until(lambda: len(server.served.engine._inbox) == 1)  # the thread is inside its step
    with monkeypatch.context() as patch:
        patch.setattr("regard.text.tokenizer.Tokenizer.encode", None)
        for choices in (1, 3):
            refused = server.client.post("/v1/completions", json=LONG | {"n": choices})
            assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["type"] == "rate_limit_error"
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
        assert server.client.post("/v1/chat/completions", json=chat).status_code == 429
        assert server.client.post("/v1/responses", json={"model": "tiny", "input": "hi"}).status_code == 429
    server.engine.may_step.set()
    for thread in (first, second):
        thread.join()
    assert [response.status_code for response in responses] == [200, 200]
    assert server.client.post("/v1/completions", json=LONG | {"n": 2}).status_code == 200


def test_all_choices_are_submitted_or_none(start_server):
    server = start_server(queue=2)
    server.engine.submit([5], Sampling(max_new=1 << 20))  # by another thread than the server's
    assert server.client.post("/v1/completions", json=LONG | {"n": 2}).status_code == 429
    wait_until(lambda: server.engine.cancelled == 1)
    server.engine.active.clear()
    assert server.client.post("/v1/completions", json=LONG | {"n": 2}).status_code == 200


def test_a_failed_step_ends_its_requests_only(start_server, tokenizer, caplog):
    server = start_server(poison=7)
    response = server.client.post("/v1/completions", json=LONG | {"prompt": [7]})
    assert response.status_code == 500 and response.json()["error"]["code"] == "engine_error"
    assert "0xdeadbeef" not in response.text and "0xdeadbeef" in caplog.text
    with server.client.stream("POST", "/v1/completions", json=LONG | {"prompt": [7], "stream": True}) as streamed:
        blocks = [line for line in streamed.iter_lines() if line]
    assert json.loads(blocks[0].removeprefix("data: "))["error"]["code"] == "engine_error"
    assert blocks[-1] == "data: [DONE]"
    assert server.client.post("/v1/completions", json=LONG).status_code == 200


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_requests_fail_if_the_engine_thread_died(start_server, monkeypatch):
    server = start_server()
    monkeypatch.setattr(FakeEngine, "step", lambda self: sys.exit())  # not an Exception, so it ends the thread
    assert server.client.post("/v1/completions", json=LONG).status_code == 500
    assert server.client.get("/health").status_code == 503
    assert server.client.post("/v1/completions", json=LONG).status_code == 503


def test_an_unexpected_exception_shows_no_traceback(start_server, monkeypatch):
    server = start_server()
    monkeypatch.setattr(FakeEngine, "metrics", lambda self: 1 / 0)
    response = server.client.get("/metrics")
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal" and "division" not in response.text
    assert (
        httpx.get(f"{server.url}/health", timeout=60).status_code == 200
    )  # a new connection: uvicorn closes one that failed


@pytest.mark.parametrize("drain", [0.05, 20.0])
def test_a_signal_drains_and_ends_every_stream(tokenizer, drain):
    """With a short drain the server ends a long response; with a long drain a short response finishes."""
    engine = FakeEngine(tokenizer, "again and again", repeat=True)
    engine.step_seconds = 0.01
    address: Queue[str] = Queue()
    server = Server(create_app([ServedModel("tiny", tokenizer, engine)]), "127.0.0.1", 0, drain, on_ready=address.put)
    thread = threading.Thread(target=server.run)
    thread.start()
    url = address.get(timeout=60)
    body = LONG | {"stream": True, "max_tokens": 4000 if drain < 1 else 20}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        server.handle_exit(signal.SIGTERM, None)
        assert server.models.draining
        remaining = [line for line in lines if line]
    thread.join()
    assert remaining[-1] == "data: [DONE]" and engine.idle
    assert ("shutting down" in remaining[-2]) == (drain < 1)


def test_a_second_signal_exits_at_once_without_tracebacks(tokenizer):
    urls, engine, log = Queue(), FakeEngine(tokenizer, "x", repeat=True), logging.handlers.QueueHandler(Queue())
    engine.step_seconds = 0.02  # over a minute for both responses
    server = Server(create_app([ServedModel("tiny", tokenizer, engine)]), "127.0.0.1", 0, drain=60, on_ready=urls.put)
    logging.getLogger("uvicorn.error").addHandler(log)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        url = urls.get(timeout=60)
        plain: list[httpx.Response] = []
        posting = threading.Thread(
            target=lambda: plain.append(httpx.post(f"{url}/v1/completions", json=LONG, timeout=120))
        )
        posting.start()
        wait_until(lambda: engine.submitted)
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG | {"stream": True}, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            server.handle_exit(signal.SIGTERM, None)
            assert server.should_exit and not server.force_exit
            server.handle_exit(signal.SIGTERM, None)
            thread.join(timeout=30)
            assert not thread.is_alive()
        posting.join(timeout=30)
    finally:
        logging.getLogger("uvicorn.error").removeHandler(log)
    error = plain[0].json()["error"]
    assert plain[0].status_code == 503 and plain[0].headers["retry-after"]
    assert error["code"] == "shutting_down" and "send the request again later" in error["message"]
    assert log.queue.empty()
    assert server.passes_log not in logging.getLogger("uvicorn.error").filters
