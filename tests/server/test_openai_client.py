"""The official `openai` client against a running server."""

import openai
import pytest

from tests.server.conftest import REPLY


@pytest.fixture
def server(start_server):
    return start_server(key="k")


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="k", max_retries=0) as client:
        yield client


def test_models_are_listed(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "regard"


def test_a_completion_has_logprobs(client):
    completion = client.completions.create(model="tiny", prompt="Mira", max_tokens=5, logprobs=2, seed=1, temperature=0)
    logprobs = completion.choices[0].logprobs
    assert completion.choices[0].text == "".join(logprobs.tokens) and len(logprobs.top_logprobs[0]) == 2
    assert completion.usage.completion_tokens == 5


def test_a_streamed_chat_equals_the_whole_chat(client):
    request = {"model": "tiny", "messages": [{"role": "user", "content": "Where?"}]}
    completion = client.chat.completions.create(**request, logprobs=True, top_logprobs=2)
    assert completion.choices[0].message.content == REPLY
    assert len(completion.choices[0].logprobs.content[0].top_logprobs) == 2
    chunks = list(client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == REPLY
    assert chunks[-1].usage == completion.usage and chunks[-2].choices[0].finish_reason == "stop"


def test_additional_fields_reach_the_engine(client, server):
    extra = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1}
    client.completions.create(model="tiny", prompt="Mira", extra_body=extra)
    client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Where?"}], extra_body=extra)
    for request in server.engine.submitted:
        assert {name: getattr(request.sampling, name) for name in extra} == extra
    assert len(server.engine.submitted) == 2


def test_errors_are_raised_as_openai_exceptions(client):
    with pytest.raises(openai.NotFoundError, match="tiny"):
        client.completions.create(model="gpt-9", prompt="Mira")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="Mira", temperature=9)
    assert caught.value.param == "temperature" and caught.value.type == "invalid_request_error"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
