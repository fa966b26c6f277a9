"""POST /v1/embeddings and /v1/rerank, with a real encoder and the `openai` client."""

import threading
from collections.abc import Iterator

import httpx
import numpy as np
import openai
import pytest
import torch

from regard.kernels.attention.mask import Full
from regard.language_model import LanguageModel
from regard.models.encoder import Encoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import SwiGLU
from regard.parts.input import Tokens
from regard.server.app import create_app
from regard.server.network_options import NetworkOptions
from regard.server.response_bodies import ResponseBody
from regard.server.served_model import ServedModel, TextEncoder
from regard.server.text_encoder import Embeddings, Ranking
from regard.text.train import byte
from tests.server.conftest import serve

TEXTS = ["the red lamp", "a wooden box in the garden", "Mira", "x"]


@pytest.fixture(scope="module")
def llm() -> LanguageModel:
    block = Block((Sublayer(Attention(heads=2, mask=Full())), Sublayer(SwiGLU(16))))
    return LanguageModel(Encoder(Tokens(261), 16, (Repeat((block,), 2),)).build(seed=0), byte(), context=40)


@pytest.fixture(scope="module")
def url(llm) -> Iterator[str]:
    app = create_app(
        [ServedModel("encoder", llm.tokenizer, encoder=TextEncoder(llm.embed, context=40))], NetworkOptions(keys=("k",))
    )
    with serve(app) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def client(url) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, headers={"authorization": "Bearer k"}, timeout=60) as client:
        yield client


def post(client: httpx.Client, path: str, schema: type[ResponseBody], **body) -> dict:
    response = client.post(path, json={"model": "encoder"} | body)
    assert response.status_code == 200, response.text
    schema.model_validate_json(response.content)
    return response.json()


def test_embeddings_equal_those_of_the_model(client, llm):
    many = TEXTS * 20  # more than one batch
    response = post(client, "/v1/embeddings", Embeddings, input=many)
    found = torch.tensor([entry["embedding"] for entry in response["data"]])
    torch.testing.assert_close(found, llm.embed(many))
    assert [entry["index"] for entry in response["data"]] == list(range(80))
    tokens = sum(len(llm.tokenizer.encode_with_special_tokens(text)) for text in many)
    assert response["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    single = post(client, "/v1/embeddings", Embeddings, input="Mira", encoding_format="float", dimensions=16)
    torch.testing.assert_close(torch.tensor(single["data"][0]["embedding"]), llm.embed("Mira"))


def test_the_openai_client_reads_base64(url, llm):
    """The client asks for base64 unless it is told otherwise."""
    with openai.OpenAI(base_url=url + "/v1", api_key="k", max_retries=0) as client:
        for options in ({}, {"encoding_format": "float"}):
            response = client.embeddings.create(model="encoder", input=TEXTS, **options)
            vectors = np.array([entry.embedding for entry in response.data], dtype=np.float32)
            np.testing.assert_allclose(vectors, llm.embed(TEXTS).numpy(), atol=1e-6)


@pytest.mark.parametrize(
    ("path", "change", "code"),
    [
        ("/v1/embeddings", {"input": ""}, "invalid_value"),
        ("/v1/embeddings", {"input": []}, "invalid_value"),
        ("/v1/embeddings", {"input": [1, 2]}, "invalid_value"),
        ("/v1/embeddings", {"input": "x" * 41}, "context_length_exceeded"),
        ("/v1/embeddings", {"input": "x", "dimensions": 8}, "invalid_value"),
        ("/v1/embeddings", {"input": "x", "encoding_format": "int8"}, "invalid_value"),
        ("/v1/rerank", {"query": "", "documents": ["x"]}, "invalid_value"),
        ("/v1/rerank", {"query": "x", "documents": []}, "invalid_value"),
        ("/v1/rerank", {"query": "x", "documents": ["x"], "top_n": 2}, "invalid_value"),
        ("/v1/rerank", {"query": "x", "documents": ["x" * 41]}, "context_length_exceeded"),
    ],
)
def test_invalid_requests_are_refused(client, path, change, code):
    response = client.post(path, json={"model": "encoder"} | change)
    assert response.status_code == 400 and response.json()["error"]["code"] == code, response.text


def test_documents_are_ordered_by_the_cosine_of_their_embeddings(client, llm):
    query, *documents = llm.embed(["where is the lamp", *TEXTS])
    scores = [float(query @ document) for document in documents]
    response = post(client, "/v1/rerank", Ranking, query="where is the lamp", documents=TEXTS, return_documents=True)
    assert [entry["index"] for entry in response["results"]] == sorted(range(4), key=lambda i: -scores[i])
    for entry in response["results"]:
        assert entry["relevance_score"] == pytest.approx(scores[entry["index"]], abs=1e-6)
        assert entry["document"] == {"text": TEXTS[entry["index"]]}
    objects = [{"text": text} for text in TEXTS]
    best = post(client, "/v1/rerank", Ranking, query="where is the lamp", documents=objects, top_n=1)["results"]
    assert best == [response["results"][0] | {"document": None}]


def test_a_cross_encoder_scores_pairs(llm):
    def score(pairs):
        return [len(document) - len(query) for query, document in pairs]

    app = create_app([ServedModel("encoder", llm.tokenizer, encoder=TextEncoder(score=score, context=40))])
    with serve(app) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        results = post(client, "/v1/rerank", Ranking, query="abc", documents=TEXTS)["results"]
        assert [(entry["index"], entry["relevance_score"]) for entry in results] == [(1, 23), (0, 9), (2, 1), (3, -2)]
        response = client.post("/v1/embeddings", json={"model": "encoder", "input": "x"})
        assert response.status_code == 404 and response.json()["error"]["code"] == "no_embeddings"
        body = {"model": "encoder", "query": "x" * 20, "documents": ["x" * 21]}  # together too long
        assert client.post("/v1/rerank", json=body).json()["error"]["code"] == "context_length_exceeded"


def test_an_encoder_generates_no_text(client, llm, monkeypatch):
    response = client.post("/v1/completions", json={"model": "encoder", "prompt": "Mira"})
    assert response.status_code == 404 and response.json()["error"]["code"] == "no_generation"
    monkeypatch.setattr(llm.tokenizer, "chat_template", None)
    body = {"model": "encoder", "messages": [{"role": "user", "content": "Mira"}]}
    error = client.post("/v1/chat/completions", json=body).json()["error"]
    assert error["code"] == "no_chat_template" and "/v1/embeddings" in error["message"]
    for path in ("/health", "/ready", "/metrics", "/regard/model", "/v1/models"):
        assert client.get(path).status_code == 200


def test_a_model_without_an_encoder_has_no_embeddings(start_server):
    client = start_server().client
    for path, body in [("embeddings", {"input": "x"}), ("rerank", {"query": "x", "documents": ["x"]})]:
        response = client.post(f"/v1/{path}", json={"model": "tiny"} | body)
        assert response.status_code == 404 and response.json()["error"]["code"] == "no_embeddings"


def test_the_server_answers_while_texts_are_embedded(llm):
    started, may_finish = threading.Event(), threading.Event()

    def embed(texts):
        started.set()
        assert may_finish.wait(timeout=60)
        return llm.embed(texts)

    app = create_app([ServedModel("encoder", llm.tokenizer, encoder=TextEncoder(embed))])
    with serve(app) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        thread = threading.Thread(target=post, args=(client, "/v1/embeddings", Embeddings), kwargs={"input": "x"})
        thread.start()
        assert started.wait(timeout=60) and client.get("/health").status_code == 200
        may_finish.set()
        thread.join()
