"""The official `openai` client against a running server."""

import inspect

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


QUESTION = {"role": "user", "content": "Where?"}


def test_a_reply_can_be_appended_to_the_messages(client, server, tokenizer):
    """As the client's object, with the fields that were sent, and as a dict with all its fields, most of them null."""
    message = client.chat.completions.create(model="tiny", messages=[QUESTION]).choices[0].message
    dumped = message.model_dump()
    assert {"refusal", "annotations", "audio", "function_call", "tool_calls"} <= {k for k, v in dumped.items() if not v}
    template = f"<|user|> Where?<|assistant|> {REPLY.strip()}<|end|><|user|> Where?<|assistant|>"
    for reply in (message, dumped, dumped | {"annotations": []}):
        client.chat.completions.create(model="tiny", messages=[QUESTION, reply, QUESTION])
        assert server.engine.submitted[-1].ids == tuple(tokenizer.encode(template, special=True))
    client.chat.completions.create(model="tiny", messages=[QUESTION, dumped | {"content": None}, QUESTION])
    template = "<|user|> Where?<|assistant|> <|end|><|user|> Where?<|assistant|>"
    assert server.engine.submitted[-1].ids == tuple(tokenizer.encode(template, special=True))


HARMLESS = {
    "audio": None, "function_call": "none", "functions": None, "logit_bias": {}, "metadata": {"project": "lamps"},
    "modalities": ["text"], "moderation": None, "parallel_tool_calls": True, "prediction": None,
    "prompt_cache_key": "k", "prompt_cache_options": None, "prompt_cache_retention": "in_memory",
    "reasoning_effort": None, "response_format": {"type": "text"}, "safety_identifier": "someone",
    "service_tier": "auto", "store": False, "tool_choice": "auto", "tools": None, "user": "someone",
    "verbosity": "medium", "web_search_options": None, "best_of": 1, "suffix": None,
}  # fmt: skip


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_every_parameter_of_the_client_may_have_a_value_that_asks_for_nothing(client, server, endpoint):
    create = client.chat.completions.create if endpoint == "chat" else client.completions.create
    prompt = {"messages": [QUESTION | {"name": "Mira"}]} if endpoint == "chat" else {"prompt": "Mira"}
    parameters = set(inspect.signature(create).parameters) - {"extra_headers", "extra_query", "extra_body", "timeout"}
    harmless = {name: HARMLESS.get(name) for name in sorted(parameters - {"model", *prompt})}
    create(model="tiny", **prompt, extra_body=harmless)
    for name, value in harmless.items():
        create(model="tiny", **prompt, extra_body={name: None})
        create(model="tiny", **prompt, extra_body={name: value})
    assert len({request.ids for request in server.engine.submitted}) == 1
    assert len({request.sampling for request in server.engine.submitted}) == 1


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
