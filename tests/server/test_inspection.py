"""The /regard routes: facts about the model, tokenization, attention maps."""

import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch

from tests.server.conftest import wait_until
from tests.server.fake_engine import HEADS, FakeRecording


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
    expected = FakeRecording(tokenizer.encode(body["text"])).weights(1)[2]
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
    server = start_server(lens=None)
    assert server.client.get("/regard/model").json()["attention"] is False
    assert server.client.post("/regard/attention", json={"text": "Mira"}).status_code == 404


class BlockedRecording(FakeRecording):
    """Waits for `may_finish` in the forward, and in the map of the second layer."""

    forwards: list

    def __init__(self, ids, target=()):
        super().__init__(ids)
        self.forwards.append(ids)
        assert self.may_finish.wait(timeout=20)

    def weights(self, layer, *part):
        if layer == 1:
            assert self.may_finish.wait(timeout=20)
        return super().weights(layer, *part)


@pytest.fixture
def blocked():
    """A lens whose passes wait until its event is set."""
    return type("Blocked", (BlockedRecording,), {"may_finish": threading.Event(), "forwards": []})


def test_a_stream_goes_on_while_an_overview_is_computed(start_server, blocked):
    server = start_server(repeat=True, lens=blocked)
    overview = []

    def post() -> None:
        overview.append(httpx.post(f"{server.url}/regard/attention", json={"text": "Mira"}, timeout=20))

    thread = threading.Thread(target=post)
    thread.start()
    wait_until(lambda: blocked.forwards)
    body = {"model": "tiny", "prompt": "Mira", "max_tokens": 100, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=body) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]" and json.loads(lines[-2][6:])["choices"][0]["finish_reason"] == "length"
    assert not overview and server.client.get("/health").status_code == 200
    blocked.may_finish.set()
    thread.join()
    assert overview[0].status_code == 200


def test_the_maps_of_a_text_share_one_forward(start_server, blocked):
    blocked.may_finish.set()
    client = start_server(lens=blocked).client

    def view(text: str, **head) -> None:
        assert client.post("/regard/attention", json={"text": text} | head).status_code == 200

    view("Mira")
    view("Mira", layer=0, head=1)
    view("Mira", layer=3, head=0)
    assert len(blocked.forwards) == 1
    for text in ("a", "b", "c", "Mira", "d", "Mira"):  # four texts are kept, those that were used last
        view(text)
    assert len(blocked.forwards) == 5
    view("a")
    assert len(blocked.forwards) == 6


def test_recordings_of_many_bytes_are_dropped(start_server, blocked):
    blocked.may_finish.set()
    blocked.nbytes = 300 << 20
    client = start_server(lens=blocked).client
    for text in ("a", "b", "b", "a"):
        assert client.post("/regard/attention", json={"text": text}).status_code == 200
    assert len(blocked.forwards) == 3


def test_too_many_requests_for_maps_are_refused(start_server, blocked):
    server = start_server(lens=blocked)
    lens = server.served.lens
    with ThreadPoolExecutor(9) as threads:
        waiting = [
            threads.submit(httpx.post, f"{server.url}/regard/attention", json={"text": "Mira"}, timeout=20)
            for _ in range(8)
        ]
        wait_until(lambda: lens._thread.requests == 8)
        refused = server.client.post("/regard/attention", json={"text": "Mira"})
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        blocked.may_finish.set()
        assert {response.result().status_code for response in waiting} == {200}
    assert lens._thread.requests == 0


def test_a_disconnected_client_leaves_the_queue(start_server, blocked):
    server = start_server(lens=blocked)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/regard/attention", json={"text": "Mira"}, timeout=0.2)
    wait_until(lambda: server.served.lens._thread.requests == 0)
    blocked.may_finish.set()
