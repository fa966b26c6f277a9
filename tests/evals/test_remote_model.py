"""A model behind `regard serve` has the results of the same model in this process."""

import json
from collections.abc import Iterator

import httpx
import pytest
import torch

from regard.engine.engine import Engine
from regard.evals.local_model import LocalModel
from regard.evals.remote_model import RemoteModel
from regard.evals.task_file import EvalQuestion, EvalTask
from regard.evals.task_run import TaskResult, evaluate_task
from regard.server.app import create_app
from regard.server.served_model import ServedModel
from tests.evals.test_task_run import QUESTIONS, SHOTS
from tests.evals.tiny_decoder import TEXT, tiny_decoder
from tests.server.conftest import serve

WINDOW = 40
LONG = EvalQuestion("long", TEXT * 2, ("the red box",), ("the red box", "Mira"))
TASKS = [
    EvalTask("choice", "choice", [*QUESTIONS, LONG], SHOTS),
    EvalTask("generation", "generation", [*QUESTIONS, LONG], SHOTS, max_new=6),
    EvalTask(
        "perplexity", "perplexity", [EvalQuestion("", text, ()) for text in (TEXT * 2, "Tomás", "They are unable")]
    ),
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    llm = tiny_decoder(dtype=torch.float32)
    app = create_app([ServedModel("tiny", llm.tokenizer, Engine(llm.model, rows=4))])
    with serve(app) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def local() -> LocalModel:
    return LocalModel(tiny_decoder(dtype=torch.float32), window=WINDOW)


def check_equal(found: TaskResult, expected: TaskResult) -> None:
    assert (found.rows, found.shots, found.truncated) == (expected.rows, expected.shots, expected.truncated)
    for name, metric in expected.metrics.items():
        assert found.metrics[name] == pytest.approx(metric, rel=1e-5), name
    for one, other in zip(found.samples, expected.samples, strict=True):
        for name, value in other.items():
            numeric = name in ("logprob", "logprobs")
            assert one[name] == (pytest.approx(value, rel=1e-5, abs=1e-4) if numeric else value), name


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
@pytest.mark.parametrize("own_tokenizer", [False, True])
def test_results_equal_those_of_the_model_itself(
    url: str, local: LocalModel, task: EvalTask, own_tokenizer: bool
) -> None:
    tokenizer = local.llm.tokenizer if own_tokenizer else None
    remote = RemoteModel(f"{url}/v1", tokenizer=tokenizer, rows=3, window=WINDOW)
    shots = 0 if task.kind == "perplexity" else 1
    check_equal(evaluate_task(remote, task, shots=shots), evaluate_task(local, task, shots=shots))


def test_chats_are_asked_in_the_template(url: str, local: LocalModel) -> None:
    remote, (choice, generation, _) = RemoteModel(url, window=WINDOW), TASKS
    check_equal(evaluate_task(remote, generation, chat=True), evaluate_task(local, generation, chat=True))
    with pytest.raises(ValueError, match="name the tokenizer by --tokenizer"):
        evaluate_task(remote, choice, chat=True)
    with_tokenizer = RemoteModel(url, tokenizer=local.llm.tokenizer, window=WINDOW)
    check_equal(evaluate_task(with_tokenizer, choice, chat=True), evaluate_task(local, choice, chat=True))


def test_a_server_names_its_window_and_models(url: str) -> None:
    assert RemoteModel(url).window == 62
    with pytest.raises(ValueError, match="window=63 is not between 1 and the 62"):
        RemoteModel(url, window=63)
    with pytest.raises(ValueError, match="has no model 'other'; it has tiny"):
        RemoteModel(url, "other")


def test_a_server_that_does_not_say_how_much_it_reads_needs_a_window(
    url: str, local: LocalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = httpx.Client.request

    def request(self, method: str, path: str, **options):
        response = answer(self, method, path, **options)
        if path != "/v1/models":
            return response
        cards = [{"id": card["id"]} for card in response.json()["data"]]
        return httpx.Response(200, json={"data": cards}, request=response.request)

    monkeypatch.setattr(httpx.Client, "request", request)
    with pytest.raises(ValueError, match="does not say how many tokens it reads; give --context"):
        RemoteModel(url, tokenizer=local.llm.tokenizer)
    assert RemoteModel(url, tokenizer=local.llm.tokenizer, window=100_000).window == 100_000


CARDS = {"data": [{"id": "a"}]}
TOKENS = {"tokens": [1], "max_model_len": 9}


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"/v1/models": {}}, "/v1/models answers {}, not a list `data` of models"),
        ({"/v1/models": None}, "/v1/models answers None, not a JSON object"),
        ({"/v1/models": []}, "/v1/models answers [], not a JSON object"),
        ({"/v1/models": {"data": [{}]}}, "not a list `data` of models with an `id`"),
        ({"/v1/models": {"data": {"a": 1}}}, "not a list `data` of models with an `id`"),
        ({"/tokenize": {"tokens": [1]}}, "does not say how many tokens it reads; give --context"),
        (
            {"/tokenize": TOKENS | {"max_model_len": "9"}},
            "/tokenize answers {'tokens': [1], 'max_model_len': '9'}, not",
        ),
        (
            {"/tokenize": {"max_model_len": 9}},
            "/tokenize answers {'max_model_len': 9}, not an answer with a list `tokens`",
        ),
        ({"/regard/model": []}, "/regard/model answers [], not a JSON object"),
        ({"/regard/model": {"start_id": "<s>"}}, "/regard/model answers '<s>', not a token id"),
        ({"/regard/model": httpx.ReadTimeout("timed out")}, "server does not answer: timed out"),
        ({"/v1/completions": {}}, "/v1/completions answers {}, not a list `choices`"),
        (
            {"/v1/completions": {"choices": [{"index": 0}]}},
            "not a list `choices` with `index` and `text` for each of 1",
        ),
        ({"/v1/completions": {"choices": []}}, "not a list `choices` with `index` and `text` for each of 1 prompts"),
    ],
)
def test_servers_that_answer_something_else_are_named(
    answers: dict, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = {"/v1/models": CARDS, "/tokenize": TOKENS, "/regard/model": {"start_id": 1}} | answers

    def request(self, method: str, path: str, **options):
        if isinstance(found := usual[path], Exception):
            raise found
        return httpx.Response(200, content=json.dumps(found))

    monkeypatch.setattr(httpx.Client, "request", request)
    with pytest.raises(ValueError) as error:
        model = RemoteModel("http://server/v1")
        model.encode("a")
        model.complete([[1]], 1, [])
    assert str(error.value).startswith("http://server") and message in str(error.value)


def test_servers_that_cannot_answer_say_why(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for address in ("http://[::1", "http://127.0.0.1\0"):
        with pytest.raises(ValueError, match="is not an address"):
            RemoteModel(address)
    with pytest.raises(ValueError, match="does not answer"):
        RemoteModel("http://127.0.0.1:9")
    remote, answer = RemoteModel(url), httpx.Client.request

    def without(missing: str):
        def request(self, method: str, path: str, **options):
            response = answer(self, method, path, **options)
            if path == missing:
                return httpx.Response(404, text="not found", request=response.request)
            if path == "/v1/completions":
                body = response.json()
                for choice in body["choices"]:
                    choice["logprobs"] = None
                return httpx.Response(200, json=body, request=response.request)
            return response

        return request

    monkeypatch.setattr(httpx.Client, "request", without("/tokenize"))
    with pytest.raises(ValueError, match="has no /tokenize; name the model's tokenizer by --tokenizer"):
        RemoteModel(url)
    monkeypatch.setattr(httpx.Client, "request", without("nothing"))
    with pytest.raises(ValueError, match="does not return the log-probabilities of an echoed prompt"):
        evaluate_task(remote, TASKS[0])
