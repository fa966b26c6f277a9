"""The /regard routes: facts about the model, tokenization, attention maps."""

import math

import pytest
import torch

from tests.server.fake_engine import HEADS, fake_maps


def test_the_model_route_returns_context_layers_and_heads(start_server):
    facts = start_server().client.get("/regard/model").json()
    assert facts["name"] == "tiny" and facts["context"] == 4096 and facts["chat"] and facts["attention"]
    assert facts["heads"] == list(HEADS) and facts["layers"] == len(HEADS)


def test_text_and_messages_are_tokenized(start_server, tokenizer):
    server = start_server()
    response = server.client.post("/regard/tokenize", json={"text": "Mira put <|end|>"}).json()
    assert response["ids"] == tokenizer.encode("Mira put <|end|>") and "".join(response["tokens"]) == "Mira put <|end|>"
    response = server.client.post("/regard/tokenize", json={"messages": [{"role": "user", "content": "hi"}]}).json()
    assert response["tokens"][0] == "<|user|>" and response["tokens"][-1] == "<|assistant|>"


def test_one_head_returns_its_whole_map(start_server, tokenizer):
    body = {"text": "Mira put the lamp", "layer": 1, "head": 2}
    response = start_server().client.post("/regard/attention", json=body).json()
    expected = fake_maps(tokenizer.encode(body["text"]))[1][2]
    torch.testing.assert_close(torch.tensor(response["weights"]), expected, atol=1e-4, rtol=0)
    assert response["entropy"][0] == 0 and 0 < response["entropy"][-1] < math.log(len(response["tokens"]))


def test_all_heads_return_thumbnails(start_server):
    body = {"text": "the lamp in the garden " * 12}
    rows = start_server().client.post("/regard/attention", json=body).json()["layers"]
    assert [0 if row is None else len(row["thumbnails"]) for row in rows] == list(HEADS)
    thumbnails = [thumbnail for row in rows if row for thumbnail in row["thumbnails"]]
    assert {(len(thumbnail), len(thumbnail[0])) for thumbnail in thumbnails} == {(24, 24)}
    assert all(len(row["entropy"]) == 4 for row in rows if row)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer": 4, "head": 0}, "layers are 0 to 3"),
        ({"layer": 2, "head": 0}, "no attention"),
        ({"layer": 0, "head": 4}, "has 4 heads"),
        ({"layer": 0}, "both"),
        ({"text": "lamp " * 600}, "512"),
        ({"text": ""}, "0 tokens"),
        ({"messages": []}, "messages"),
    ],
)
def test_wrong_layers_heads_and_lengths_are_refused(start_server, change, message):
    response = start_server().client.post("/regard/attention", json={"text": "Mira"} | change)
    assert response.status_code == 400 and message in response.json()["error"]["message"]


def test_attention_without_a_lens_is_not_found(start_server):
    server = start_server(lens=False)
    assert server.client.get("/regard/model").json()["attention"] is False
    assert server.client.post("/regard/attention", json={"text": "Mira"}).status_code == 404
