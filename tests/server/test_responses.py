"""POST /v1/responses: the official client, plain and as a stream, and the events of streams."""

import inspect
import json

import openai
import pytest

from regard.server.responses_api_schema import ResponsesResponse
from tests.server.conftest import REPLY


@pytest.fixture
def server(start_server):
    return start_server(key="k")


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="k", max_retries=0) as client:
        yield client


def prompt_of(server, tokenizer) -> str:
    return tokenizer.decode(list(server.engine.submitted[-1].ids), special=True)


def test_a_string_is_answered(client, server, tokenizer):
    response = client.responses.create(model="tiny", input="Where?", instructions="Be brief.", metadata={"a": "b"})
    assert response.output_text == REPLY and response.status == "completed" and response.metadata == {"a": "b"}
    assert prompt_of(server, tokenizer) == "<|system|> Be brief.<|user|> Where?<|assistant|>"
    usage = response.usage
    assert usage.input_tokens == len(server.engine.submitted[-1].ids)
    assert usage.output_tokens == len(server.engine.script) + 1
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    raw = server.client.post("/v1/responses", json={"model": "tiny", "input": "Where?"})
    ResponsesResponse.model_validate_json(raw.content)


def test_the_output_can_be_appended_to_the_input(client, server, tokenizer):
    items = [{"role": "user", "content": [{"type": "input_text", "text": "Where?"}]}]
    response = client.responses.create(model="tiny", input=items, include=["message.output_text.logprobs"])
    expected = f"<|user|> Where?<|assistant|> {REPLY.strip()}<|end|><|user|> Why?<|assistant|>"
    for output in (response.output, [item.model_dump() for item in response.output]):
        client.responses.create(model="tiny", input=[*items, *output, {"role": "user", "content": "Why?"}])
        assert prompt_of(server, tokenizer) == expected


def test_settings_reach_the_engine_and_a_limit_is_reported(client, server):
    include = ["message.output_text.logprobs"]
    response = client.responses.create(
        model="tiny", input="a", max_output_tokens=3, temperature=0.5, top_p=0.9, include=include, top_logprobs=2
    )
    sampling = server.engine.submitted[-1].sampling
    assert (sampling.max_new, sampling.temperature, sampling.top_p, sampling.top_logprobs) == (3, 0.5, 0.9, 2)
    assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete" and REPLY.startswith(response.output_text)
    logprobs = response.output[0].content[0].logprobs
    assert "".join(entry.token for entry in logprobs) == response.output_text
    assert [len(entry.top_logprobs) for entry in logprobs] == [2, 2, 2]


@pytest.mark.parametrize("limit", [None, 4])
def test_a_stream_has_all_events_in_order(client, limit):
    events = list(client.responses.create(model="tiny", input="Where?", stream=True, max_output_tokens=limit))
    types = [event.type for event in events]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert types == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        *["response.output_text.delta"] * len(deltas),
        "response.output_text.done", "response.content_part.done", "response.output_item.done",
        "response.completed" if limit is None else "response.incomplete",
    ]  # fmt: skip
    final = events[-1].response
    assert "".join(deltas) == final.output_text == events[-4].text == events[-3].part.text
    assert final.output_text == REPLY if limit is None else REPLY.startswith(final.output_text)
    assert events[0].response.status == "in_progress" and events[0].response.output == []
    assert {event.item_id for event in events[3:-2]} == {final.output[0].id} == {events[2].item.id}
    assert events[-2].item == final.output[0] and final.usage.output_tokens > 0
    with client.responses.stream(model="tiny", input="Where?") as stream:
        assert stream.get_final_response().output_text == REPLY


def test_a_failed_stream_ends_with_an_error(start_server, tokenizer):
    poison = tokenizer.encode("<|assistant|>", special=True)[0]
    server = start_server(poison=poison)
    with server.client.stream(
        "POST", "/v1/responses", json={"model": "tiny", "input": "a", "stream": True}
    ) as response:
        blocks = [block for block in response.read().decode().split("\n\n") if block]
    name, data = blocks[-1].split("\n")
    error = json.loads(data.removeprefix("data: "))
    assert name == "event: error" and error["type"] == "error" and error["code"] == "engine_error"
    assert error["sequence_number"] == len(blocks) - 1


def test_every_parameter_of_the_client_may_have_a_value_that_asks_for_nothing(client, server):
    harmless = {
        "background": False, "include": [], "parallel_tool_calls": True, "reasoning": {"effort": None},
        "service_tier": "auto", "store": False, "text": {"format": {"type": "text"}}, "tool_choice": "auto",
        "tools": [], "truncation": "disabled", "user": "someone", "prompt_cache_key": "k", "metadata": {},
    }  # fmt: skip
    parameters = set(inspect.signature(client.responses.create).parameters)
    for name in parameters - {"model", "input", "extra_headers", "extra_query", "extra_body", "timeout"}:
        client.responses.create(model="tiny", input="a", extra_body={name: None})
    client.responses.create(model="tiny", input="a", extra_body=harmless)
    assert len({request.sampling for request in server.engine.submitted}) == 1


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"truncation": "auto"}, "truncation"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "a b", "schema": {}}}}, "text.format"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"input": []}, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "input"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "1"}]}, "input"),
        ({"input": [{"type": "reasoning", "id": "1", "summary": []}]}, "input"),
        ({"tools": [{"type": "function", "name": "f"}]}, "tools"),  # the template has no tools
        ({"tool_choice": "required"}, "tool_choice"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"top_logprobs": 2}, None),
        ({"stop": ["x"]}, "stop"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(server, change, param):
    response = server.client.post("/v1/responses", json={"model": "tiny", "input": "a"} | change)
    assert response.status_code == 400, response.text
    assert param is None or response.json()["error"]["param"].startswith(param), response.text
