"""Salt, priority, tenant and deadline of a request; the tokens of its prompt that came from the prefix cache."""

import openai
import pytest

from regard.engine.engine import Engine
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.server.app import create_app
from regard.server.served_model import ServedModel
from regard.text.train import byte
from tests.server.conftest import serve

BODIES = {
    "/v1/completions": {"model": "tiny", "prompt": "Mira"},
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "Where?"}]},
    "/v1/responses": {"model": "tiny", "input": "Where?"},
}


@pytest.mark.parametrize("path", BODIES)
def test_options_reach_the_engine(start_server, path):
    server = start_server()
    server.client.post(path, json=BODIES[path])
    options = {"cache_salt": "secret", "priority": -3, "timeout": 60.5}
    assert server.client.post(path, json=BODIES[path] | options).status_code == 200
    plain, request = server.engine.submitted
    assert (plain.salt, plain.priority, plain.tenant, plain.deadline) == ("", 0, "", None)
    assert (request.salt, request.priority, request.tenant) == ("secret", -3, "") and request.deadline is not None
    for bad in ({"cache_salt": ""}, {"cache_salt": "x" * 257}, {"priority": 2**31}, {"timeout": 0}, {"timeout": -1}):
        response = server.client.post(path, json=BODIES[path] | bad)
        assert response.status_code == 400 and response.json()["error"]["param"] == next(iter(bad))


@pytest.mark.parametrize("path", BODIES)
def test_a_request_ends_at_its_deadline(start_server, path):
    server = start_server(repeat=True)
    server.engine.clock = lambda: 0.07 * sum(len(request.new) for request in server.engine.submitted)
    response = server.client.post(path, json=BODIES[path] | {"timeout": 0.1})
    assert response.status_code == 408 and response.json()["error"]["code"] == "timeout"
    assert response.json()["error"]["type"] == "timeout_error"
    text = server.client.post(path, json=BODIES[path] | {"timeout": 0.3, "stream": True}).text
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    assert len(events) > 2 and '"code":"timeout"' in events[-1]  # some text, then the error
    assert [len(request.new) for request in server.engine.submitted] == [2, 5]
    assert not server.engine.active


def test_several_keys_are_tenants_that_share_no_prefixes(start_server):
    server = start_server(key=["first", "second"])
    for key, tenant in (("first", "key 1"), ("second", "key 2")):
        headers = {"authorization": f"Bearer {key}"}
        for path, body in BODIES.items():
            assert server.client.post(path, json=body | {"cache_salt": "s"}, headers=headers).status_code == 200
            request = server.engine.submitted[-1]
            assert request.tenant == tenant and request.salt == f"{tenant}\0s"
            refused = server.client.post(path, json=body | {"priority": -1}, headers=headers)
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "priority"
    for wrong in ("x", "third", "first,second", "key 1"):
        headers = {"authorization": f"Bearer {wrong}"}
        assert server.client.get("/v1/models", headers=headers).status_code == 401


@pytest.fixture
def engine():
    model = Decoder(vocab=261, width=16, layers=(Repeat((Block((Sublayer(Attention(heads=2)),)),)),), context=512)
    return Engine(model.build(seed=0), rows=8)


@pytest.fixture
def client(engine):
    with (
        serve(create_app([ServedModel("tiny", byte(), engine)])) as port,
        openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="k", max_retries=0) as client,
    ):
        yield client


def test_usage_counts_the_tokens_of_the_prompt_that_were_cached(client):
    messages = [{"role": "user", "content": "Where is the lamp? " * 8}]
    chat = {"model": "tiny", "messages": messages, "max_tokens": 2}
    first, second = (client.chat.completions.create(**chat).usage for _ in range(2))
    cached = second.prompt_tokens_details.cached_tokens
    assert first.prompt_tokens_details.cached_tokens == 0 and 0 < cached < second.prompt_tokens
    stream = client.chat.completions.create(**chat, stream=True, stream_options={"include_usage": True})
    assert list(stream)[-1].usage.prompt_tokens_details.cached_tokens == cached
    salted = client.chat.completions.create(**chat, extra_body={"cache_salt": "mine"}).usage
    assert salted.prompt_tokens_details.cached_tokens == 0
    response = client.responses.create(model="tiny", input=messages, max_output_tokens=2)
    assert response.usage.input_tokens_details.cached_tokens == cached
    completion = {"model": "tiny", "prompt": ["the red lamp " * 8] * 2, "max_tokens": 2}
    assert client.completions.create(**completion).usage.prompt_tokens_details.cached_tokens < 104
    assert client.completions.create(**completion).usage.prompt_tokens_details.cached_tokens > 104


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_n_choices_compute_their_prompt_once(client, engine, endpoint):
    text = "Where is the lamp? " * 8
    if endpoint == "chat":
        answer = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": text}], n=4, max_tokens=3
        )
    else:
        answer = client.completions.create(model="tiny", prompt=text, n=2, best_of=4, max_tokens=3)
    prompt, numbers = answer.usage.prompt_tokens, engine.metrics()
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert numbers["prefix_query_tokens"] == 4 * prompt
    block = engine.store.shared_block
    assert numbers["prefix_hit_tokens"] == 3 * ((prompt - 1) // block * block) > 0


def test_the_error_event_of_a_stream_is_raised_by_the_client(client):
    long = {"model": "tiny", "prompt": "a", "max_tokens": 400, "stream": True}
    stream = client.completions.create(**long, extra_body={"timeout": 0.02, "ignore_eos": True})
    with pytest.raises(openai.APIError, match="deadline"):
        list(stream)
