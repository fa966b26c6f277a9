"""A judge behind an address: the same log-odds as in this process, letters without probabilities, refused addresses."""

import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from regard.engine.engine import Engine
from regard.feedback import address_judge
from regard.feedback.address_judge import AddressJudge, check_address, log_odds_of, read_content
from regard.feedback.judge import LIMIT, ModelJudge, judge_pairs
from regard.language_model import LanguageModel
from regard.server.app import create_app
from regard.server.served_model import ServedModel
from tests.feedback.test_judge import PAIRS
from tests.server.conftest import serve


def test_our_own_server_gives_the_log_odds_of_the_model(letters: LanguageModel) -> None:
    app = create_app([ServedModel("letters", letters.tokenizer, Engine(letters.model, rows=4))])
    with serve(app) as port:
        judge = AddressJudge(f"http://localhost:{port}/v1")
        assert judge.name == "letters"
        found = judge_pairs(judge, PAIRS)
    for verdict, expected in zip(found, judge_pairs(ModelJudge(letters), PAIRS), strict=True):
        assert verdict == pytest.approx(expected, abs=1e-4)


Answer = Callable[[dict[str, Any] | None], tuple[Any, ...]]


@contextmanager
def stub_server(answer: Answer) -> Iterator[str]:
    """`answer` gets the body of a request, None for the list of models, and returns a status, a JSON value (or bytes),
    and perhaps headers."""

    class Handler(BaseHTTPRequestHandler):
        def respond(self, body: dict[str, Any] | None) -> None:
            status, value, *headers = answer(body)
            content = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(status)
            for name, text in {"content-length": str(len(content)), "retry-after": "0", **dict(*headers)}.items():
                self.send_header(name, text)
            self.end_headers()
            with suppress(OSError):  # the judge may have gone
                self.wfile.write(content)

        def do_GET(self) -> None:
            self.respond(None)

        def do_POST(self) -> None:
            self.respond(json.loads(self.rfile.read(int(self.headers["content-length"]))))

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


MODELS = {"data": [{"id": "one"}]}


def reply(content: str) -> tuple[Any, ...]:
    return 200, {"choices": [{"message": {"content": content}}]}


def test_a_busy_server_is_asked_again_and_letters_are_verdicts() -> None:
    bodies: list[dict[str, Any]] = []

    def answer(body: dict[str, Any] | None) -> tuple[Any, ...]:
        if body is None:
            return 200, MODELS
        bodies.append(body)
        if len(bodies) == 1:
            return 429, {"error": {"message": "full"}}, {"retry-after": "\u00b2"}  # no decimal digit
        return reply(" B.")

    with stub_server(answer) as url:
        (verdict,) = judge_pairs(AddressJudge(url), PAIRS[:1])
    assert verdict == (-LIMIT, LIMIT, 0) and not verdict.consistent and verdict.log_odds == 0
    assert len(bodies) == 3 and bodies[0]["model"] == "one" and bodies[0]["temperature"] == 0


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda body: (200, {"data": [{"id": "one"}, {"id": "two"}]}), "--judge-name: one, two"),
        (lambda body: (200, {"data": [1]}), "lists no models"),
        (lambda body: (200, {"data": [{"id": 1}]}), "lists no models"),
        (lambda body: (200, {"data": []}), "lists no models"),
        (lambda body: (200, {"data": None}), "lists no models"),
        (lambda body: (200, b" " * (5 << 20)), "more than 4 MiB"),
        (lambda body: (200, MODELS) if body is None else reply("Neither A nor B"), "none of 2 questions with A or B"),
        (lambda body: (200, MODELS) if body is None else (400, {"error": {"message": "too long"}}), "400: too long"),
        (lambda body: (200, MODELS) if body is None else (200, {"text": "A"}), "not a chat completion"),
        (lambda body: (200, MODELS) if body is None else (503, {"error": {"message": "full"}}), "503: full"),
        (lambda body: (200, [1]), "status 200"),
    ],
)
def test_faults_of_a_server_are_reported(answer: Answer, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address_judge, "TIMEOUT", 1)
    with stub_server(answer) as url, pytest.raises(ValueError, match=message):
        judge_pairs(AddressJudge(url), PAIRS[:1])


def test_responses_are_closed_also_when_reading_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    responses, wait_for_response = [], HTTPConnection.getresponse

    def recorded(connection: HTTPConnection) -> HTTPResponse:
        responses.append(wait_for_response(connection))
        return responses[-1]

    monkeypatch.setattr(HTTPConnection, "getresponse", recorded)
    with (
        stub_server(lambda body: (200, MODELS if body is None else b" " * (5 << 20))) as url,
        pytest.raises(ValueError, match="more than 4 MiB"),
    ):
        AddressJudge(url).ask(["0"])
    assert len(responses) == 2 and all(response.isclosed() for response in responses)


def test_a_name_chooses_among_several_models() -> None:
    with stub_server(lambda body: (200, {"data": [{"id": "one"}, {"id": "two"}]})) as url:
        assert AddressJudge(url, "two").name == "two"
        with pytest.raises(ValueError, match="serves no model 'three'"):
            AddressJudge(url, "three")
    with pytest.raises(ValueError, match="cannot be reached .*regard serve MODEL"):
        AddressJudge(url)


@pytest.mark.parametrize(
    "address",
    [
        "http://example.com", "http://192.168.0.1:8000", "http://127.0.0.1.example.com", "http://0.0.0.0:80",
        "https://127.0.0.1", "http://user@127.0.0.1", "file:///etc/passwd", "http://", "http://127.0.0.1:99999",
        "http://127.0.0.1?x=1", "http://[fe80::1]", "http://@127.0.0.1", "http://:@127.0.0.1", "http://127.0.0.1:0",
        "http://127.0.0.1/\u00e9",
    ],
)  # fmt: skip
def test_only_addresses_on_this_machine_are_asked(address: str) -> None:
    with pytest.raises(ValueError, match="address"):
        check_address(address)


def test_forms_of_an_address() -> None:
    assert check_address("http://127.0.0.1:8000") == ("127.0.0.1", 8000, "/v1")
    assert check_address("http://localhost:8000/v1/") == ("localhost", 8000, "/v1")
    assert check_address("http://[::1]/api/v1/chat/completions") == ("::1", 80, "/api/v1")


def test_log_odds_of_completions() -> None:
    def completion(content: str, *tokens: dict[str, Any]) -> dict[str, Any]:
        return {"choices": [{"message": {"content": content}, "logprobs": {"content": list(tokens)}}]}

    top = [{"token": "A", "logprob": -1.0}, {"token": " A", "logprob": -2.0}, {"token": " B", "logprob": -3.0}]
    token = {"token": "A", "logprob": -1.0, "top_logprobs": top}
    # log(e⁻¹ + e⁻²) + 3
    assert log_odds_of(completion("A", token)) == pytest.approx(2.3132617)
    space = {"token": " ", "logprob": -0.1, "top_logprobs": []}
    assert log_odds_of(completion(" A", space, token)) == pytest.approx(2.3132617)
    unlisted = {"token": "B", "logprob": -0.5, "top_logprobs": [{"token": "x", "logprob": -4.0}]}
    assert log_odds_of(completion("B", unlisted)) == pytest.approx(-3.5)
    assert log_odds_of(completion("B", {"token": "B", "logprob": -0.5})) == -LIMIT
    assert log_odds_of(completion("**A** is better")) == LIMIT
    marks = {"token": "**", "logprob": -0.1, "top_logprobs": [{"token": "A", "logprob": -9.0}]}
    assert log_odds_of(completion("**A**", marks, token)) == pytest.approx(2.3132617)
    assert log_odds_of(completion("A", {"token": "A", "logprob": -9999.0})) == LIMIT
    # only the first word counts, with log-probabilities and without
    for text in ("Both are good", "Neither A nor B", "I prefer A", "A/B", ""):
        words = [{**token, "token": f" {word}"} for word in text.split()]
        assert log_odds_of(completion(text)) is None and log_odds_of(completion(text, *words)) is None
    assert log_odds_of({"choices": [{"message": {"content": None}, "logprobs": None}]}) is None
    for wrong in (math.nan, math.inf, 1000.0, 10**400, "x", None):
        with pytest.raises(ValueError, match="not a chat completion"):
            log_odds_of(completion("A", {**token, "logprob": wrong}))


def test_redirects_and_proxies_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere: list[Any] = []

    def record(body: dict[str, Any] | None) -> tuple[Any, ...]:
        elsewhere.append(body)
        return (200, MODELS) if body is None else reply("A")

    with stub_server(record) as other:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, other)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        for status in (301, 302, 303, 307, 308):
            redirect = (status, {}, {"location": f"{other}/v1/chat/completions"})
            with stub_server(lambda body, redirect=redirect: (200, MODELS) if body is None else redirect) as url:
                judge = AddressJudge(url)
                with pytest.raises(ValueError, match=f"status {status}"):
                    judge.ask(["Which?"])
        assert not elsewhere
        assert AddressJudge(other).ask(["Which?"]) == [LIMIT] and len(elsewhere) == 2  # it does answer


def test_a_name_that_leads_elsewhere_is_sent_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []

    def record(body: dict[str, Any] | None) -> tuple[Any, ...]:
        sent.append(body)
        return 200, MODELS

    with stub_server(record) as url:
        monkeypatch.setattr(socket.socket, "getpeername", lambda self: ("192.0.2.1", 80))
        with pytest.raises(ValueError, match="leads to 192.0.2.1, which is not on this machine"):
            AddressJudge(url.replace("127.0.0.1", "localhost"))
    assert not sent


def test_a_busy_server_is_asked_until_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    now, attempts = 0.0, []
    monkeypatch.setattr(address_judge, "time", SimpleNamespace(monotonic=lambda: now))

    def busy(body: dict[str, Any] | None) -> tuple[Any, ...]:
        nonlocal now
        now += 149.99  # of 600 seconds, so that none is left for a fifth attempt
        attempts.append(time.monotonic())
        return 503, {"error": {"message": "full"}}, {"retry-after": "0"}

    with stub_server(busy) as url, pytest.raises(ValueError, match="503: full"):
        AddressJudge(url)
    assert len(attempts) == 4 and all(later - earlier > 0.09 for earlier, later in pairwise(attempts))


def test_a_response_that_never_ends_is_given_up_at_the_deadline() -> None:
    class Endless(HTTPResponse):
        def __init__(self) -> None:
            pass

        def read1(self, n: int = -1) -> bytes:
            time.sleep(0.01)
            return b" "

    with pytest.raises(TimeoutError):
        read_content(Endless(), time.monotonic() + 0.05)


@pytest.mark.parametrize("waiting", ["for its turn", "for the response"])
def test_a_failure_ends_the_other_requests(waiting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address_judge, "MAX_WAIT", 60)
    together, release = threading.Barrier(4), threading.Event()

    def answer(body: dict[str, Any] | None) -> tuple[Any, ...]:
        if body is None:
            return 200, MODELS
        with suppress(threading.BrokenBarrierError):
            together.wait(timeout=60)
        if body["messages"][0]["content"] == "3":
            return 400, {"error": {"message": "too long"}}
        if waiting == "for the response":
            release.wait(timeout=60)
        return 429, {"error": {"message": "full"}}, {"retry-after": "60"}

    with stub_server(answer) as url:
        judge, start = AddressJudge(url), time.monotonic()
        with pytest.raises(ValueError, match="400: too long"):
            judge.ask(["0", "1", "2", "3"])
        assert time.monotonic() - start < 30
        release.set()
