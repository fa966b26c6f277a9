"""The /regard routes: facts about the model, tokenization, attention maps."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.server.conftest import unanswered_post, wait_until
from tests.server.fake_engine import HEADS, FakeRecording

OVERVIEW, HEAD = "/regard/attention/overview", "/regard/attention/head"


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


def test_the_tokens_of_each_message_are_found(start_server):
    client = start_server().client
    contents = {"system": "Answer a user.", "user": "a", "assistant": ""}  # "a" is a part of the template, too
    messages = [{"role": role, "content": content} for role, content in contents.items()]
    found = client.post("/regard/tokenize", json={"messages": messages}).json()
    texts = [span and "".join(found["tokens"][slice(*span)]).strip() for span in found["spans"]]
    assert texts == ["Answer a user.", "a", None]
    found = client.post("/regard/tokenize", json={"text": "Mira put"}).json()
    assert found["spans"] == [[0, len(found["ids"])]]


def test_attention_without_a_lens_is_not_found(start_server):
    server = start_server(lens=None)
    assert server.client.get("/regard/model").json()["attention"] is False
    assert server.client.post(OVERVIEW, json={"ids": [5]}).status_code == 404


class BlockedRecording(FakeRecording):
    """Waits for `may_finish` in the forward, and in the map of the second layer."""

    forwards: list

    def __init__(self, ids, target=()):
        super().__init__(ids)
        self.forwards.append(ids)
        assert self.may_finish.wait(timeout=60)

    def weights(self, layer, *part):
        if layer == 1:
            assert self.may_finish.wait(timeout=60)
        return super().weights(layer, *part)


@pytest.fixture
def blocked():
    """A lens whose passes wait until its event is set."""
    return type("Blocked", (BlockedRecording,), {"may_finish": threading.Event(), "forwards": []})


def test_a_stream_goes_on_while_an_overview_is_computed(start_server, blocked):
    server = start_server(repeat=True, lens=blocked)
    overview = []

    def post() -> None:
        overview.append(httpx.post(server.url + OVERVIEW, json={"ids": [5]}, timeout=60))

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

    def view(id: int, **head) -> None:
        assert client.post(HEAD if head else OVERVIEW, json={"ids": [id]} | head).status_code == 200

    view(5)
    view(5, layer=0, head=1)
    view(5, layer=3, head=0)
    assert len(blocked.forwards) == 1
    for id in (6, 7, 8, 5, 9, 5):  # four sequences are kept, those that were used last
        view(id)
    assert len(blocked.forwards) == 5
    view(6)
    assert len(blocked.forwards) == 6


def test_recordings_of_many_bytes_are_dropped(start_server, blocked):
    blocked.may_finish.set()
    blocked.nbytes = 300 << 20
    client = start_server(lens=blocked).client
    for id in (6, 7, 7, 6):
        assert client.post(OVERVIEW, json={"ids": [id]}).status_code == 200
    assert len(blocked.forwards) == 3


def test_too_many_requests_for_maps_are_refused(start_server, blocked):
    server = start_server(lens=blocked)
    lens = server.served.lens
    with ThreadPoolExecutor(9) as threads:
        waiting = [threads.submit(httpx.post, server.url + OVERVIEW, json={"ids": [5]}, timeout=60) for _ in range(8)]
        wait_until(lambda: lens._thread.requests == 8)
        refused = server.client.post(OVERVIEW, json={"ids": [5]})
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        blocked.may_finish.set()
        assert {response.result().status_code for response in waiting} == {200}
    assert lens._thread.requests == 0


def test_a_disconnected_client_leaves_the_queue(start_server, blocked):
    server = start_server(lens=blocked)
    with unanswered_post(server.url, OVERVIEW, {"ids": [5]}):
        wait_until(lambda: blocked.forwards)
        assert server.served.lens._thread.requests == 1
    wait_until(lambda: server.served.lens._thread.requests == 0)
    blocked.may_finish.set()
