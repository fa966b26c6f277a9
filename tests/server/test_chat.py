"""POST /v1/chat/completions."""

import math

import pytest

from tests.server.conftest import REPLY
from tests.server.test_completions import stream

QUESTION = [{"role": "user", "content": "Where is the lamp?"}]


def test_the_template_renders_the_prompt(start_server, tokenizer):
    server = start_server()
    parts = [{"type": "text", "text": "Where is "}, {"type": "text", "text": "the lamp?"}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    response = server.client.post("/v1/chat/completions", json={"model": "tiny", "messages": messages}).json()
    expected = tokenizer.encode("<|system|> Be brief.<|user|> Where is the lamp?<|assistant|>", special=True)
    assert server.engine.submitted[-1].ids == tuple(expected)
    assert response["object"] == "chat.completion" and response["choices"][0]["finish_reason"] == "stop"
    assert response["choices"][0]["message"] == {"role": "assistant", "content": REPLY, "refusal": None}
    assert server.engine.submitted[-1].sampling.max_new == server.engine.capacity - len(expected)  # all tokens that fit


def test_the_template_gets_the_name_of_a_message(start_server, tokenizer):
    server = start_server()
    server.served.tokenizer.chat_template = "{% for m in messages %}{{ m.name }}: {{ m.content }}{% endfor %}"
    messages = [{"role": "user", "content": "Where?", "name": "Mira <|end|>"}]
    assert server.client.post("/v1/chat/completions", json={"model": "tiny", "messages": messages}).status_code == 200
    ids = server.engine.submitted[-1].ids
    assert tokenizer.decode(list(ids)) == "Mira <|end|>: Where?" and tokenizer.eos not in ids


THINKING = (
    "{% set _ = 1 %}{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %} no thoughts{% endif %}{{ style }}"
)


def test_the_template_gets_the_variables_of_a_request(start_server, tokenizer):
    server = start_server(template=THINKING)
    for path, field in (("/v1/chat/completions", None), ("/v1/responses", None), ("/tokenize", "tokens")):
        messages = {"input" if path == "/v1/responses" else "messages": QUESTION}
        for variables, text in (
            (None, "Where is the lamp?"),
            ({"enable_thinking": True}, "Where is the lamp?"),
            ({"enable_thinking": False, "style": " brief"}, "Where is the lamp? no thoughts brief"),
            ({"style": "<|end|>"}, "Where is the lamp?<|end|>"),  # as characters
        ):
            response = server.client.post(path, json=messages | {"chat_template_kwargs": variables})
            assert response.status_code == 200, response.text
            ids = list(response.json()[field] if field else server.engine.submitted[-1].ids)
            assert tokenizer.decode(ids) == text and tokenizer.eos not in ids


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"messages": []}, "the variable 'messages' of the chat template is set already"),
        ({"tools": []}, "the variable 'tools' of the chat template is set already"),
        ({"add_generation_prompt": False}, "is set already; leave it out"),
        ({"bos_token": "<|end|>"}, "the variable 'bos_token' of the chat template is set already"),
        ({"enable_thinkng": False}, "has no variable 'enable_thinkng'; it has enable_thinking, style"),
        ({"namespace": 1}, "has no variable 'namespace'"),
        ({"a b": 1}, "chat_template_kwargs"),
        ({f"a{i}": 1 for i in range(65)}, "65 items"),
        ({"style": "x " * 500_000}, "characters cannot fit"),
    ],
)
def test_other_variables_are_refused_by_name(start_server, variables, message):
    client = start_server(template=THINKING).client
    body = {"messages": QUESTION, "chat_template_kwargs": variables}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400 and message in response.json()["error"]["message"]


def test_logprobs_contain_alternatives(start_server):
    body = {"model": "tiny", "messages": QUESTION, "logprobs": True, "top_logprobs": 3, "max_completion_tokens": 4}
    choice = start_server().client.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    content = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == choice["message"]["content"]
    for entry in content:
        assert bytes(entry["bytes"]).decode() == entry["token"] and len(entry["top_logprobs"]) == 3
        assert 0 < math.exp(entry["logprob"]) <= 1


def test_stream_begins_with_the_role_and_ends_with_usage(start_server):
    body = {"messages": QUESTION, "n": 2, "logprobs": True, "stream_options": {"include_usage": True}}
    chunks = stream(start_server(), "/v1/chat/completions", **body)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    usage = chunks.pop()
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] > 0
    for index in (0, 1):
        choices = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in choices) == REPLY
        assert choices[-1]["delta"] == {} and choices[-1]["finish_reason"] == "stop"


def test_tokens_inside_a_character_have_its_bytes(start_server):
    body = {"model": "tiny", "messages": QUESTION, "logprobs": True}
    choice = start_server("🙂").client.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert choice["message"]["content"] == "🙂"
    assert [entry["bytes"] for entry in choice["logprobs"]["content"]] == [[byte] for byte in "🙂".encode()]


def test_a_chat_without_a_template_is_refused(start_server):
    response = start_server(template=None).client.post(
        "/v1/chat/completions", json={"model": "tiny", "messages": QUESTION}
    )
    assert response.status_code == 400 and response.json()["error"]["code"] == "no_chat_template"
