"""A judge behind an address: the same log-odds as in this process, letters without probabilities, refused addresses."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from regard.engine.engine import Engine
from regard.feedback import address_judge
from regard.feedback.address_judge import AddressJudge, check_address, log_odds_of
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


@contextmanager
def stub_server(answer: Callable[[dict[str, Any] | None], tuple[int, Any]]) -> Iterator[str]:
    """`answer` gets the body of a request, None for the list of models, and returns a status and a JSON value."""

    class Handler(BaseHTTPRequestHandler):
        def respond(self, body: dict[str, Any] | None) -> None:
            status, value = answer(body)
            content = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.send_header("retry-after", "0")
            self.end_headers()
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


def test_a_busy_server_is_asked_again_and_letters_are_verdicts() -> None:
    bodies: list[dict[str, Any]] = []

    def answer(body: dict[str, Any] | None) -> tuple[int, Any]:
        if body is None:
            return 200, MODELS
        bodies.append(body)
        if len(bodies) == 1:
            return 429, {"error": {"message": "full"}}
        return 200, {"choices": [{"message": {"content": " B."}}]}

    with stub_server(answer) as url:
        (verdict,) = judge_pairs(AddressJudge(url), PAIRS[:1])
    assert verdict == (-LIMIT, LIMIT) and not verdict.consistent and verdict.log_odds == 0
    assert len(bodies) == 3 and bodies[0]["model"] == "one" and bodies[0]["temperature"] == 0


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda body: (200, {"data": [{"id": "one"}, {"id": "two"}]}), "--judge-name: one, two"),
        (lambda body: (200, MODELS) if body is None else (400, {"error": {"message": "too long"}}), "400: too long"),
        (lambda body: (200, MODELS) if body is None else (200, {"text": "A"}), "not a chat completion"),
        (lambda body: (200, MODELS) if body is None else (302, {}), "status 302"),
        (lambda body: (200, MODELS) if body is None else (503, {"error": {"message": "full"}}), "503: full"),
        (lambda body: (200, [1]), "status 200"),
    ],
)
def test_faults_of_a_server_are_reported(
    answer: Callable[..., tuple[int, Any]], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address_judge, "ATTEMPTS", 2)
    with stub_server(answer) as url, pytest.raises(ValueError, match=message):
        judge_pairs(AddressJudge(url), PAIRS[:1])


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
        "http://127.0.0.1?x=1", "http://[fe80::1]",
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
    assert log_odds_of(completion("Both are good")) is None and log_odds_of(completion("")) is None
    assert log_odds_of({"choices": [{"message": {"content": None}, "logprobs": None}]}) is None
