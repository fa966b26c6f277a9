"""Several models in one server: requests reach the model that they name, and the failure of one is not another's."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch

from regard.engine.engine import Engine
from regard.engine.request import Sampling
from regard.models.decoder import Decoder, DecoderModule
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import SwiGLU
from regard.parts.position.rope import Rope
from regard.server.app import create_app
from regard.server.model_registry import ModelRegistry
from regard.server.served_model import ServedModel, TextEncoder
from regard.text.tokenizer import Tokenizer
from regard.text.train import byte
from tests.server.conftest import RunningServer, serve, wait_until
from tests.server.fake_engine import FakeEngine, fake_embeddings, fake_lens
from tests.server.test_metrics import parse

WITHOUT_MODEL = {
    "/v1/completions": {"prompt": "Mira"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Where?"}]},
    "/v1/responses": {"input": "Where?"},
    "/v1/embeddings": {"input": "Mira"},
    "/v1/rerank": {"query": "Mira", "documents": ["the lamp"]},
    "/tokenize": {"prompt": "Mira"},
    "/detokenize": {"tokens": [5]},
    "/regard/tokenize": {"text": "Mira"},
    "/regard/attention/overview": {"ids": [5]},
    "/regard/attention/head": {"ids": [5], "layer": 0, "head": 0},
}


@pytest.fixture
def server(tokenizer: Tokenizer) -> Iterator[RunningServer]:
    """Two models that generate, each with a reply of its own, and an encoder."""
    engine = FakeEngine(tokenizer, " The lamp", poison=7)
    chat = Tokenizer(tokenizer.core, eos="<|end|>", chat_template=tokenizer.chat_template)
    models = [
        ServedModel("lamp", chat, engine, lens=fake_lens()),
        ServedModel("box", tokenizer, FakeEngine(tokenizer, " The box")),
        ServedModel("vectors", byte(), encoder=TextEncoder(fake_embeddings, context=9)),
    ]
    app = create_app(models)
    with serve(app) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        yield RunningServer(str(client.base_url), client, engine, app)


def complete(client: httpx.Client, model: str, prompt: object = "Mira") -> httpx.Response:
    return client.post("/v1/completions", json={"model": model, "prompt": prompt})


def test_each_request_reaches_the_model_that_it_names(server):
    cards = server.client.get("/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["lamp", "box", "vectors"]
    assert [card["max_model_len"] for card in cards] == [4096, 4096, 9]
    assert server.client.get("/v1/models/box").json()["id"] == "box"
    for name, reply in (("lamp", " The lamp"), ("box", " The box")):
        response = complete(server.client, name).json()
        assert response["model"] == name and response["choices"][0]["text"] == reply
    embedded = server.client.post("/v1/embeddings", json={"model": "vectors", "input": "abc"}).json()
    assert embedded["model"] == "vectors" and len(embedded["data"][0]["embedding"]) == 4
    assert complete(server.client, "vectors").json()["error"]["code"] == "no_generation"
    refused = server.client.post("/v1/embeddings", json={"model": "lamp", "input": "abc"})
    assert refused.json()["error"]["code"] == "no_embeddings"


def test_a_request_without_a_model_is_refused_with_the_names_of_the_models(server):
    for path, body in WITHOUT_MODEL.items():
        for missing in ({}, {"model": None}):
            response = server.client.post(path, json=body | missing)
            error = response.json()["error"]
            assert (response.status_code, error["code"], error["param"]) == (400, "model_required", "model"), path
            assert error["message"].endswith("send 'lamp' or 'box' or 'vectors'")
    form = {"files": {"file": b"x"}}
    assert server.client.post("/v1/audio/transcriptions", **form).json()["error"]["code"] == "model_required"


def test_the_only_model_need_not_be_named(tokenizer):
    chat = Tokenizer(tokenizer.core, eos="<|end|>", chat_template=tokenizer.chat_template)
    encoder, lens = TextEncoder(fake_embeddings), fake_lens()
    app = create_app([ServedModel("only", chat, FakeEngine(tokenizer, " The lamp"), encoder=encoder, lens=lens)])
    with serve(app) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        for path, body in WITHOUT_MODEL.items():
            response = client.post(path, json=body)
            assert response.status_code == 200, path
            if response.headers["content-type"] == "application/json":
                assert response.json().get("model", "only") == "only", path
        refused = client.post("/v1/audio/transcriptions", files={"file": b"x"}).json()["error"]
        assert refused["message"].startswith("the model 'only' reads no audio")
        schemas = client.get("/openapi.json").json()["components"]["schemas"]
        bodies = [
            name for name in schemas if name.endswith(("Body", "Form")) and "model" in schemas[name]["properties"]
        ]
        assert len(bodies) == 15 and not any("model" in schemas[name].get("required", ()) for name in bodies)


def test_the_page_starts_with_the_first_model(server):
    described = server.client.get("/regard/model").json()
    assert described["name"] == "lamp" and described["models"] == ["lamp", "box", "vectors"] and described["attention"]
    other = server.client.get("/regard/model", params={"model": "vectors"}).json()
    assert other["name"] == "vectors" and other["context"] == 9 and not other["attention"]
    routes = (("/regard/tokenize", {"text": "Mira"}, "ids"), ("/tokenize", {"prompt": "Mira"}, "tokens"))
    ids = [
        server.client.post(path, json=body | model).json()[field]
        for path, body, field in routes
        for model in ({"model": "lamp"}, {"model": "vectors"})
    ]
    assert ids[0] == ids[2] != ids[1] == ids[3]
    body = {"ids": [5], "model": "box"}
    assert server.client.post("/regard/attention/overview", json=body).json()["error"]["code"] == "no_lens"


@pytest.mark.parametrize(("name", "hint"), [("lmap", "did you mean 'lamp'?"), ("x" * 256, "use 'lamp' or 'box'")])
def test_an_unknown_name_is_404_with_the_names_of_the_models(server, name, hint):
    requests = (
        ("POST", "/v1/completions", {"model": name, "prompt": "a"}),
        ("POST", "/v1/chat/completions", {"model": name, "messages": [{"role": "user", "content": "a"}]}),
        ("POST", "/v1/responses", {"model": name, "input": "a"}),
        ("POST", "/v1/embeddings", {"model": name, "input": "a"}),
        ("POST", "/v1/rerank", {"model": name, "query": "a", "documents": ["a"]}),
        ("POST", "/tokenize", {"model": name, "prompt": "a"}),
        ("POST", "/detokenize", {"model": name, "tokens": [5]}),
        ("POST", "/regard/tokenize", {"model": name, "text": "a"}),
        ("POST", "/regard/attention/overview", {"model": name, "ids": [5]}),
        ("POST", "/regard/attention/head", {"model": name, "ids": [5], "layer": 0, "head": 0}),
        ("GET", f"/regard/heads?model={name}", None),
        ("GET", f"/v1/models/{name}", None),
        ("GET", f"/regard/model?model={name}", None),
    )
    for method, path, body in requests:
        response = server.client.request(method, path, json=body)
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model"), path
        assert hint in error["message"] and "'vectors'" in error["message"]


def test_a_failing_step_fails_only_the_requests_of_its_model(server):
    server.engine.may_step.clear()
    with ThreadPoolExecutor(2) as pool:
        failing = pool.submit(complete, server.client, "lamp", [7])
        wait_until(lambda: len(server.engine.active) == 1)
        assert complete(server.client, "box").json()["choices"][0]["text"] == " The box"  # while the other waits
        server.engine.may_step.set()
        assert failing.result().status_code == 500
    assert complete(server.client, "lamp").json()["choices"][0]["text"] == " The lamp"
    assert server.client.get("/health").status_code == 200


def test_a_stopped_engine_leaves_the_other_model_in_service(server):
    server.served.engine.close()
    assert complete(server.client, "lamp").status_code == 503
    assert complete(server.client, "box").json()["choices"][0]["text"] == " The box"
    assert "engine of lamp has stopped" in server.client.get("/health").json()["error"]["message"]
    assert server.client.get("/ready").status_code == 503
    families = parse(server.client.get("/metrics").text)
    up = families["regard_engine_up"]
    assert up.value(model="lamp") == 0 and up.value(model="box") == 1 and len(up.samples) == 2
    assert families["regard_engine_new_tokens_total"].samples.keys() == {("", (("model", "box"),))}
    assert families["regard_request_latency_seconds"].value("_count", model="box") == 1


def test_stopping_the_server_ends_the_threads_of_all_models(tokenizer):
    engines = [FakeEngine(tokenizer, "a", repeat=True) for _ in "ab"]
    engines[1].step_seconds = 0.02  # its response takes more than a minute
    models = [ServedModel(name, tokenizer, engine) for name, engine in zip("ab", engines, strict=True)]
    app = create_app(models)
    with serve(app) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        threads = [model.engine._thread for model in models]
        assert all(thread.is_alive() for thread in threads)
        body = {"model": "b", "prompt": "a", "stream": True, "max_tokens": 4000}
        with client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            app.state.models.cancel_all("the end")
            assert any("the end" in line for line in lines)
    assert not any(thread.is_alive() for thread in threads)


def test_concurrent_requests_of_two_real_models_equal_those_alone():
    """Two models of the same shape with other weights: any state that they shared would show."""
    block = Block((Sublayer(Attention(heads=4, kv_heads=2, position=Rope())), Sublayer(SwiGLU(48))))
    spec = Decoder(vocab=261, width=32, layers=(Repeat((block,)),), context=96)
    models = {str(seed): spec.build(seed=seed).double() for seed in (1, 2)}
    tokenizer, prompts = byte(), [f"the lamp {i}" for i in range(6)]
    sampling = Sampling(max_new=8, temperature=0, stop_ids=tokenizer.stop_ids)

    def text(model: DecoderModule, prompt: str) -> str:
        tokens = Engine(model).generate(tokenizer.encode(prompt), sampling)
        return tokenizer.decode([token.id for token in tokens if token.id not in tokenizer.stop_ids])

    alone = {(name, prompt): text(model, prompt) for name, model in models.items() for prompt in prompts}
    assert alone["1", prompts[0]] != alone["2", prompts[0]]
    app = create_app([ServedModel(name, byte(), Engine(model, rows=4)) for name, model in models.items()])
    with (
        serve(app) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
        ThreadPoolExecutor(12) as pool,
    ):

        def ask(name: str, prompt: str) -> str:
            body = {"model": name, "prompt": prompt, "max_tokens": 8, "temperature": 0}
            return client.post("/v1/completions", json=body).json()["choices"][0]["text"]

        found = {key: pool.submit(ask, *key) for key in alone}
        assert {key: answer.result() for key, answer in found.items()} == alone


def test_names_are_unique(tokenizer):
    with pytest.raises(ValueError, match="two models have the name 'a'"):
        ModelRegistry([ServedModel("a", tokenizer), ServedModel("a", tokenizer)])
    with pytest.raises(ValueError, match="at least one model"):
        ModelRegistry([])


def test_embeddings_of_a_model_do_not_wait_for_a_generation(server):
    server.engine.may_step.clear()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(complete, server.client, "lamp")
        wait_until(lambda: len(server.engine.active) == 1)
        body = {"model": "vectors", "input": ["a", "bc"]}
        vectors = server.client.post("/v1/embeddings", json=body).json()["data"]
        torch.testing.assert_close(
            torch.tensor([entry["embedding"] for entry in vectors]), fake_embeddings(["a", "bc"])
        )
        server.engine.may_step.set()
        assert waiting.result().status_code == 200
