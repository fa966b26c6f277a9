"""The official `openai` client against the running server."""

import openai
import pytest

from tests.server.conftest import REPLY


@pytest.fixture
def server(live):
    return live(key="k")


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="k", max_retries=0) as client:
        yield client


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "regard"


def test_completion_with_logprobs(client):
    answer = client.completions.create(model="tiny", prompt="Mira", max_tokens=5, logprobs=2, seed=1, temperature=0)
    logprobs = answer.choices[0].logprobs
    assert answer.choices[0].text == "".join(logprobs.tokens) and len(logprobs.top_logprobs[0]) == 2
    assert answer.usage.completion_tokens == 5


def test_chat_and_streamed_chat(client):
    ask = {"model": "tiny", "messages": [{"role": "user", "content": "Where?"}]}
    answer = client.chat.completions.create(**ask, logprobs=True, top_logprobs=2)
    assert answer.choices[0].message.content == REPLY
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == REPLY
    assert chunks[-1].usage == answer.usage and chunks[-2].choices[0].finish_reason == "stop"


def test_additional_fields_reach_the_engine(client, server):
    added = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1}
    client.completions.create(model="tiny", prompt="Mira", extra_body=added)
    client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Where?"}], extra_body=added)
    for request in server.engine.submitted:
        assert {name: getattr(request.sampling, name) for name in added} == added
    assert len(server.engine.submitted) == 2


def test_errors_are_raised_as_openai_exceptions(client):
    with pytest.raises(openai.NotFoundError, match="tiny"):
        client.completions.create(model="gpt-9", prompt="Mira")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="Mira", temperature=9)
    assert caught.value.param == "temperature" and caught.value.type == "invalid_request_error"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
