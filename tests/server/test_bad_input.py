"""Invalid requests get a 4xx response in OpenAI's format, and the server keeps working."""

import json

import pytest

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "tiny", "prompt": "Mira"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
DEEP = '{"a": ' * 40 + "1" + "}" * 40


def assistant(function: dict) -> dict:
    return {"role": "assistant", "tool_calls": [CALL | {"function": function}]}


def tool(parameters: dict) -> dict:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


TOOL = tool({"type": "object"})
INVALID = [  # path, body, and the field that the error names
    ("/v1/completions", COMPLETION | {"temperature": float("nan")}, "temperature"),
    ("/v1/completions", COMPLETION | {"temperature": float("inf")}, "temperature"),
    ("/v1/completions", COMPLETION | {"temperature": -0.1}, "temperature"),
    ("/v1/completions", COMPLETION | {"temperature": "0.5"}, "temperature"),
    ("/v1/completions", COMPLETION | {"top_p": 0}, "top_p"),
    ("/v1/completions", COMPLETION | {"seed": 2**63}, "seed"),
    ("/v1/completions", COMPLETION | {"seed": -(2**63) - 1}, "seed"),
    ("/v1/completions", COMPLETION | {"max_tokens": 2**63}, "max_tokens"),
    ("/v1/completions", COMPLETION | {"max_tokens": 0}, None),
    ("/v1/completions", COMPLETION | {"max_tokens": True}, "max_tokens"),
    ("/v1/completions", COMPLETION | {"n": 17}, "n"),
    ("/v1/completions", COMPLETION | {"n": 16, "prompt": ["a"] * 9}, None),
    ("/v1/completions", COMPLETION | {"stop": ["x"] * 100_000}, "stop"),
    ("/v1/completions", COMPLETION | {"stop": [7]}, "stop"),
    ("/v1/completions", COMPLETION | {"stop": [""]}, "stop"),
    ("/v1/completions", COMPLETION | {"logprobs": 21}, "logprobs"),
    ("/v1/completions", COMPLETION | {"min_tokens": 9, "max_tokens": 8}, None),
    ("/v1/completions", COMPLETION | {"min_tokens": -1}, "min_tokens"),
    ("/v1/completions", COMPLETION | {"typical_p": 0}, "typical_p"),
    ("/v1/completions", COMPLETION | {"best_of": 3, "stream": True}, None),
    ("/v1/completions", COMPLETION | {"best_of": 16, "prompt": ["a"] * 9}, None),
    ("/v1/completions", COMPLETION | {"n": 2, "best_of": 1}, None),
    ("/v1/completions", COMPLETION | {"logit_bias": {"5": 101}}, "logit_bias"),
    ("/v1/completions", COMPLETION | {"logit_bias": {"a": 1}}, "logit_bias"),
    ("/v1/completions", COMPLETION | {"logit_bias": {"-1": 1}}, "logit_bias"),
    ("/v1/completions", COMPLETION | {"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ("/v1/completions", COMPLETION | {"prompt": []}, "prompt"),
    ("/v1/completions", COMPLETION | {"prompt": ""}, "prompt"),
    ("/v1/completions", COMPLETION | {"prompt": [-1]}, "prompt"),
    ("/v1/completions", COMPLETION | {"prompt": [2**63]}, "prompt"),
    ("/v1/completions", COMPLETION | {"prompt": [100_000]}, None),
    ("/v1/completions", COMPLETION | {"prompt": {"a": 1}}, "prompt"),
    ("/v1/completions", COMPLETION | {"prompt": "\ud800"}, "prompt"),
    ("/v1/completions", COMPLETION | {"prompt": "the lamp " * 4000}, None),
    ("/v1/completions", COMPLETION | {"max_tokens": 4096}, None),
    ("/v1/completions", COMPLETION | {"tools": []}, "tools"),
    ("/v1/completions", COMPLETION | {"\ud800": 1}, None),
    ("/v1/completions", COMPLETION | {f"k{i}": i for i in range(50_000)}, "k0"),
    ("/v1/completions", {"model": "tiny"}, "prompt"),
    ("/v1/completions", [], None),
    ("/v1/completions", None, None),
    ("/v1/chat/completions", CHAT | {"messages": []}, "messages"),
    ("/v1/chat/completions", CHAT | {"messages": CHAT["messages"] * 1025}, "messages"),
    ("/v1/chat/completions", CHAT | {"messages": [{"role": "wizard", "content": "hi"}]}, "messages"),
    ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ("/v1/chat/completions", CHAT | {"top_logprobs": 3}, None),
    ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": "hi", "name": "M" * 65}]}, "messages"),
    ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": None}]}, None),
    ("/v1/chat/completions", CHAT | {"messages": [CHAT["messages"][0] | {"refusal": "no"}]}, "refusal"),
    ("/v1/chat/completions", CHAT | {"messages": [CHAT["messages"][0] | {"tool_calls": [{}]}]}, "messages"),
    ("/v1/chat/completions", CHAT | {"messages": [CHAT["messages"][0] | {"tool_calls": [CALL]}]}, None),
    ("/v1/chat/completions", CHAT | {"messages": [assistant(CALL["function"] | {"arguments": "{"})]}, "messages"),
    ("/v1/chat/completions", CHAT | {"messages": [assistant(CALL["function"] | {"arguments": DEEP})]}, "messages"),
    ("/v1/chat/completions", CHAT | {"messages": [assistant(CALL["function"] | {"arguments": "[1]"})]}, "messages"),
    ("/v1/chat/completions", CHAT | {"messages": [{"role": "assistant", "tool_calls": [CALL] * 129}]}, "messages"),
    ("/v1/chat/completions", CHAT | {"messages": [{"role": "tool", "content": "3"}]}, None),
    ("/v1/chat/completions", CHAT | {"messages": [CHAT["messages"][0] | {"tool_call_id": "1"}]}, None),
    ("/v1/chat/completions", CHAT | {"tools": [TOOL] * 129}, "tools"),
    ("/v1/chat/completions", CHAT | {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
    ("/v1/chat/completions", CHAT | {"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "tools"),
    ("/v1/chat/completions", CHAT | {"tools": [tool(json.loads(DEEP))]}, "tools"),
    ("/v1/chat/completions", CHAT | {"tools": [TOOL]}, "tools"),  # the template has no tools
    ("/v1/chat/completions", CHAT | {"tools": [TOOL] * 2}, "tools"),
    ("/v1/chat/completions", CHAT | {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ("/v1/chat/completions", CHAT | {"tools": [TOOL], "response_format": {"type": "json_object"}}, None),
    ("/v1/chat/completions", CHAT | {"functions": [{"name": "f"}]}, "functions"),
    ("/v1/chat/completions", CHAT | {"messages": [CHAT["messages"][0] | {"annotations": [{}]}]}, "messages"),
    ("/v1/chat/completions", CHAT | {"store": True}, "store"),
    ("/v1/chat/completions", CHAT | {"service_tier": "flex"}, "service_tier"),
    ("/v1/chat/completions", CHAT | {"modalities": ["text", "audio"]}, "modalities"),
    ("/v1/chat/completions", CHAT | {"metadata": {"a": 1}}, "metadata"),
    ("/v1/chat/completions", CHAT | {"metadata": {str(i): "" for i in range(17)}}, "metadata"),
    ("/v1/chat/completions", CHAT | {"reasoning_effort": "high"}, "reasoning_effort"),
    ("/v1/chat/completions", CHAT | {"verbosity": "low"}, "verbosity"),
    ("/v1/chat/completions", CHAT | {"tool_choice": "required"}, "tool_choice"),
    ("/v1/chat/completions", CHAT | {"audio": {"voice": "alloy"}}, "audio"),
    ("/v1/completions", COMPLETION | {"suffix": "end"}, "suffix"),
    ("/v1/chat/completions", CHAT | {"stream_options": {"include_usage": True}}, None),
    ("/regard/tokenize", {"text": "a", "messages": CHAT["messages"]}, None),
    ("/regard/tokenize", {"text": 3}, "text"),
]


@pytest.fixture
def server(start_server):
    return start_server()


def check_refusal(response, status: int = 400) -> dict:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert len(response.content) < 2000 and "Traceback" not in response.text
    return error


def test_each_invalid_value_is_refused_and_its_field_named(server):
    for path, body, param in INVALID:
        content = json.dumps(body)
        response = server.client.post(path, content=content, headers={"content-type": "application/json"})
        error = check_refusal(response)
        if param:
            assert str(error["param"]).startswith(param), (content[:80], error)
    assert not server.engine.submitted
    assert server.client.post("/v1/completions", json=COMPLETION).status_code == 200


@pytest.mark.parametrize(
    "content", [b"{", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 50_000, b'{"seed":' + b"9" * 10_000 + b"}", b""]
)
def test_invalid_json_is_refused(server, content):
    check_refusal(server.client.post("/v1/completions", content=content, headers={"content-type": "application/json"}))


def test_other_content_types_are_refused(server):
    """Other sites can send a form or a text/plain post without a preflight request."""
    check_refusal(
        server.client.post("/v1/completions", content=json.dumps(COMPLETION), headers={"content-type": "text/plain"})
    )


def test_unknown_models_paths_and_methods_are_refused(server):
    error = check_refusal(server.client.post("/v1/completions", json=COMPLETION | {"model": "gpt-9"}), 404)
    assert error["code"] == "model_not_found" and "'tiny'" in error["message"]
    check_refusal(server.client.get("/v1/models/gpt-9"), 404)
    check_refusal(server.client.get("/v2"), 404)
    check_refusal(server.client.get("/v1/completions"), 405)
    for path in ("/web/../server/app.py", "/web/%2e%2e/server/app.py", "/web//etc/passwd"):
        check_refusal(server.client.get(path), 404)


def test_the_message_states_value_rule_and_remedy(server):
    """Some of the fields have union types, for which pydantic reports a violation per member."""
    messages = CHAT["messages"]
    for path, change, message in [
        ("/v1/completions", {"temperature": 3}, "temperature=3 must be at most 2; lower it"),
        ("/v1/completions", {"temperature": "0.5"}, 'temperature="0.5" must be a number; send it without quotes'),
        ("/v1/completions", {"temperature": None, "top_p": 0}, "top_p=0 must be above 0; raise it"),
        ("/v1/completions", {"n": 1.5}, "n=1.5 must be an integer; correct its type"),
        ("/v1/completions", {"stream": "yes"}, 'stream="yes" must be true or false; send it without quotes'),
        ("/v1/completions", {"user": 7}, "user=7 must be a string; send it in quotes"),
        ("/v1/completions", {"stop": 7}, "stop=7 must be a string or a list; correct its type"),
        ("/v1/completions", {"stop": ["x"] * 17}, "stop has more than 16 items; send fewer"),
        ("/v1/completions", {"stop": [""]}, 'stop.0="" has fewer than 1 characters; send more, or omit it'),
        ("/v1/completions", {"prompt": [3, -1]}, "prompt.1=-1 must be at least 0; raise it"),
        ("/v1/completions", {"prompt": {"a": 1}}, "prompt must be a string or a list; correct its type"),
        ("/v1/completions", {"prompt": []}, "prompt has fewer than 1 items; send more"),
        ("/v1/completions", {"user": "x" * 300}, "user has more than 256 characters; shorten it"),
        ("/v1/completions", {"logit_bias": {"a": 1}}, 'the key "a" of logit_bias must match the pattern ^(0|[1-9]'),
        ("/v1/completions", {"logit_bias": [1]}, "logit_bias must be an object; correct its type"),
        ("/v1/completions", {"tools": []}, "unknown or unsupported parameter 'tools'; remove it"),
        (
            "/v1/completions",
            {"max_token": 3},
            "unknown or unsupported parameter 'max_token'; did you mean 'max_tokens'?",
        ),
        (
            "/v1/completions",
            {"stream_options": {"include_use": 1}},
            "'include_use' of stream_options; did you mean",
        ),
        ("/v1/chat/completions", {"store": True}, "store=true must be false; send one of these values, or omit it"),
        ("/v1/chat/completions", {"audio": {"voice": "alloy"}}, "the parameter 'audio' is not supported; omit it"),
        (
            "/v1/chat/completions",
            {"service_tier": "flex"},
            "service_tier=\"flex\" must be 'auto' or 'default'; send one",
        ),
        ("/v1/chat/completions", {"messages": 1}, "messages=1 must be a list; correct its type"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": 5}]},
            "messages.0.content=5 must be a string or",
        ),
        ("/v1/chat/completions", {"messages": [{"content": "a"}]}, "messages.0.role is missing; send it"),
        (
            "/v1/chat/completions",
            {"messages": [messages[0] | {"txt": 1}]},
            "unsupported parameter 'txt' of messages.0; remove it",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "video"}]}]},
            "messages.0.content.0 has type='video', which must be one of 'text', 'image_url'; send one of them",
        ),
        (
            "/tokenize",
            {"prompt": "a", "mesages": 1},
            "unknown or unsupported parameter 'mesages'; did you mean 'messages'?",
        ),
    ]:
        start = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT}.get(path, {})
        error = check_refusal(server.client.post(path, json=start | change))
        assert message in error["message"], (change, error["message"])


def test_a_prompt_that_can_never_fit_is_refused_before_it_is_tokenized(server, monkeypatch):
    server.engine.capacity = 20
    monkeypatch.setattr("regard.text.tokenizer.Tokenizer.encode", None)
    long = "the lamp " * 1000
    for path, body in [
        ("/v1/completions", COMPLETION | {"prompt": long}),
        ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": long}]}),
    ]:
        error = check_refusal(server.client.post(path, json=body))
        assert error["code"] == "context_length_exceeded" and "9000 characters" in error["message"]


def test_too_many_tokens_for_the_model_are_refused(server):
    error = check_refusal(server.client.post("/v1/completions", json=COMPLETION | {"max_tokens": 4096}))
    assert error["code"] == "context_length_exceeded" and "4096" in error["message"]
