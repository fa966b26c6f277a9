"""Tools in chat and responses: the official client, plain and as a stream; forced calls have valid arguments."""

import json
from contextlib import ExitStack

import openai
import pytest

from regard.engine.engine import Engine
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import SwiGLU
from regard.server.app import create_app
from regard.server.response_bodies import ChatCompletion
from regard.server.responses_api_schema import ResponsesResponse
from regard.server.served_model import ServedModel
from regard.text.tokenizer import Tokenizer
from regard.text.train import byte
from tests.server.conftest import serve

HERMES = """\
{%- if tools %}{{ "<|system|>" ~ tools | tojson ~ " answer by <tool_call>" }}{% endif -%}
{%- for message in messages -%}
{{- "<|" ~ ("user" if message.role == "tool" else message.role) ~ "|>" ~ message.content -}}
{%- for call in message.tool_calls or [] -%}
<tool_call>{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}</tool_call>
{%- endfor -%}
{%- endfor -%}
<|assistant|>"""
LLAMA = HERMES.replace(" answer by <tool_call>", "").replace('"arguments"', '"parameters"').replace("<tool_call>", "")
MISTRAL = HERMES.replace("<tool_call>", "[TOOL_CALLS]")

SCHEMA = {
    "type": "object",
    "properties": {"room": {"enum": ["kitchen", "garden"]}, "count": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["room", "count"],
    "additionalProperties": False,
}
FIND = {"type": "function", "function": {"name": "find", "description": "Finds", "parameters": SCHEMA}}
NOW = {"type": "function", "function": {"name": "now"}}
FLAT = [{"type": "function", **tool["function"]} for tool in (FIND, NOW)]
ARGUMENTS = {"room": "garden", "count": 2}
CALL = '<tool_call>\n{"name": "find", "arguments": {"room": "garden", "count": 2}}\n</tool_call>'
CALL_NOW = '<tool_call>{"name": "now"}</tool_call>'
QUESTION = {"role": "user", "content": "Where?"}
ASK = {"model": "tiny", "messages": [QUESTION], "tools": [FIND, NOW]}


@pytest.fixture
def ask(start_server):
    """A server whose model gives this reply, and a client of it."""

    def start(reply: str, template: str = HERMES, **options):
        server = start_server(reply, template=template, **options)
        client = stack.enter_context(openai.OpenAI(base_url=server.url + "/v1", api_key="k", max_retries=0))
        return server, client

    with ExitStack() as stack:
        yield start


def test_a_call_is_returned_and_its_result_sent_back(ask):
    server, client = ask(f"I look. {CALL}{CALL_NOW}")
    choice = client.chat.completions.create(**ASK).choices[0]
    calls = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content == "I look."
    assert [(call.type, call.function.name) for call in calls] == [("function", "find"), ("function", "now")]
    assert json.loads(calls[0].function.arguments) == ARGUMENTS and len({call.id for call in calls}) == 2
    for message in (choice.message, choice.message.model_dump()):
        result = {"role": "tool", "tool_call_id": calls[0].id, "content": "in the box"}
        client.chat.completions.create(**ASK | {"messages": [QUESTION, message, result]})
        prompt = prompt_of(server)
        assert prompt.endswith(
            '<|assistant|>I look.<tool_call>{"name": "find", "arguments": {"room": "garden", "count": 2}}</tool_call>'
            '<tool_call>{"name": "now", "arguments": {}}</tool_call><|user|>in the box<|assistant|>'
        )
    assert prompt.startswith('<|system|>[{"type": "function", "function": {"name": "find"')
    raw = server.client.post("/v1/chat/completions", json=ASK)
    ChatCompletion.model_validate_json(raw.content)


def prompt_of(server) -> str:
    tokenizer = server.served.tokenizer
    return tokenizer.decode(list(server.engine.submitted[-1].ids), special=True)


def test_a_message_of_only_calls_has_null_content(ask):
    _, client = ask(CALL)
    choice = client.chat.completions.create(**ASK, n=2).choices[1]
    assert choice.message.content is None and len(choice.message.tool_calls) == 1
    single = client.chat.completions.create(**ASK, parallel_tool_calls=False).choices[0]
    assert len(single.message.tool_calls) == 1


def test_without_a_call_the_answer_is_text(ask):
    server, client = ask("a < b, <tool_call>nonsense</tool_call>")
    choice = client.chat.completions.create(**ASK).choices[0]
    assert choice.finish_reason == "stop" and choice.message.content == "a < b, <tool_call>nonsense</tool_call>"
    assert choice.message.tool_calls is None


def test_no_tools_are_offered_if_the_choice_is_none(ask):
    server, client = ask(CALL)
    choice = client.chat.completions.create(**ASK, tool_choice="none").choices[0]
    assert choice.message.content == CALL and choice.finish_reason == "stop"
    assert prompt_of(server) == "<|user|>Where?<|assistant|>"


def test_a_stream_has_text_first_then_each_call_in_pieces(ask):
    _, client = ask(f"I look. {CALL}{CALL_NOW}")
    chunks = list(client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "I look."
    assert sum(bool(delta.content) for delta in deltas) > 1  # streamed before the calls
    pieces = [piece for delta in deltas for piece in delta.tool_calls or []]
    find, now = ([piece for piece in pieces if piece.index == index] for index in (0, 1))
    assert pieces == find + now and len(find) > 5  # the arguments come as they are generated
    for first, *rest in (find, now):
        assert first.id and first.function.arguments == ""
        assert not any(piece.id or piece.function.name for piece in rest)
    assert [find[0].function.name, now[0].function.name] == ["find", "now"]
    whole = client.chat.completions.create(**ASK).choices[0].message.tool_calls
    for call, parts in zip(whole, (find, now), strict=True):
        assert "".join(piece.function.arguments for piece in parts) == call.function.arguments
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["tool_calls"]
    with client.chat.completions.stream(**ASK) as stream:
        message = stream.get_final_completion().choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["find", "now"]


def test_text_may_begin_after_a_call(ask):
    """As an item of a response it follows the call, in a stream and in a whole response."""
    _, client = ask(f"{CALL} Done.")
    whole = client.responses.create(model="tiny", input="Where?", tools=FLAT)
    assert [item.type for item in whole.output] == ["function_call", "message"] and whole.output_text == "Done."
    with client.responses.stream(model="tiny", input="Where?", tools=FLAT) as stream:
        streamed = stream.get_final_response()
    assert [item.type for item in streamed.output] == ["function_call", "message"] and streamed.output_text == "Done."


def test_a_call_that_the_limit_cuts_off_is_incomplete(ask):
    server, client = ask(CALL)
    whole = client.responses.create(model="tiny", input="Where?", tools=FLAT, max_output_tokens=40)
    body = {"model": "tiny", "input": "Where?", "tools": FLAT, "max_output_tokens": 40}
    ResponsesResponse.model_validate_json(server.client.post("/v1/responses", json=body).content)
    assert whole.status == whole.output[0].status == "incomplete"
    choice = client.chat.completions.create(**ASK, max_tokens=40).choices[0]
    assert choice.finish_reason == "length"
    assert whole.output[0].arguments == choice.message.tool_calls[0].function.arguments
    assert json.dumps(ARGUMENTS).startswith(choice.message.tool_calls[0].function.arguments)


def test_logprobs_of_a_stream_are_complete(ask):
    _, client = ask(f"I look. {CALL}")
    whole = client.chat.completions.create(**ASK, logprobs=True).choices[0].logprobs.content
    chunks = list(client.chat.completions.create(**ASK, logprobs=True, stream=True))
    streamed = [entry for c in chunks if c.choices[0].logprobs for entry in c.choices[0].logprobs.content]
    assert [entry.token for entry in streamed] == [entry.token for entry in whole]


def test_special_tokens_in_tools_and_arguments_are_only_characters(ask, tokenizer):
    server, client = ask("yes")
    tool = {"type": "function", "function": {"name": "f", "description": "<|end|>"}}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "<|end|>"}'}}
    messages = [QUESTION, {"role": "assistant", "tool_calls": [call]}]
    client.chat.completions.create(model="tiny", messages=messages, tools=[tool])
    assert prompt_of(server).count("<|end|>") == 2 and tokenizer.eos not in server.engine.submitted[-1].ids


def test_responses_have_calls_as_items(ask):
    server, client = ask(f"I look. {CALL}{CALL_NOW}")
    items = [{"role": "user", "content": "Where?"}]
    response = client.responses.create(model="tiny", input=items, tools=FLAT)
    assert [item.type for item in response.output] == ["message", "function_call", "function_call"]
    assert response.output_text == "I look." and response.tools[0].name == "find"
    call = response.output[1]
    assert json.loads(call.arguments) == ARGUMENTS
    for output in (response.output, [item.model_dump() for item in response.output]):
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "in the box"}
        client.responses.create(model="tiny", input=[*items, *output, result], tools=FLAT)
        assert prompt_of(server).endswith(
            '<|assistant|>I look.<tool_call>{"name": "find", "arguments": {"room": "garden", "count": 2}}</tool_call>'
            '<tool_call>{"name": "now", "arguments": {}}</tool_call><|user|>in the box<|assistant|>'
        )
    raw = server.client.post("/v1/responses", json={"model": "tiny", "input": "a", "tools": FLAT})
    ResponsesResponse.model_validate_json(raw.content)


@pytest.mark.parametrize("text", ["", "I look. "])
def test_responses_stream_calls_as_items(ask, text):
    _, client = ask(text + CALL)
    events = list(client.responses.create(model="tiny", input="Where?", tools=FLAT, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event for event in events if event.type.endswith("arguments.delta")]
    assert len(deltas) > 5 and {event.output_index for event in deltas} == {1 if text else 0}
    assert "".join(event.delta for event in deltas) == events[-1].response.output[-1].arguments
    types = [event.type for event in events if not event.type.endswith(".delta")]
    begun = ["output_item.added", "content_part.added"] if text else []
    ended = ["output_text.done", "content_part.done", "output_item.done"] if text else []
    call = [*begun, "output_item.added", *ended, "function_call_arguments.done", "output_item.done"]
    assert [type.removeprefix("response.") for type in types] == ["created", "in_progress", *call, "completed"]
    with client.responses.stream(model="tiny", input="Where?", tools=FLAT) as stream:
        response = stream.get_final_response()
    assert response.output_text == text.strip() and json.loads(response.output[-1].arguments) == ARGUMENTS


@pytest.fixture(scope="module", params=[HERMES, LLAMA, MISTRAL], ids=["hermes", "llama3", "mistral"])
def random_model(request):
    """A random model, which calls no tool unless the output is constrained."""
    block = Block((Sublayer(Attention(heads=2)), Sublayer(SwiGLU(16))))
    model = Decoder(vocab=261, width=16, layers=(Repeat((block,)),), context=2048).build(seed=0)
    tokenizer = Tokenizer(byte().core, eos="<|end|>", chat_template=request.param)
    with (
        serve(create_app([ServedModel("tiny", tokenizer, Engine(model, rows=4))])) as port,
        openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="k", max_retries=0) as client,
    ):
        yield client


def check(calls: list[tuple[str, str]]) -> None:
    for name, arguments in calls:
        found = json.loads(arguments)
        assert found.keys() == SCHEMA["properties"].keys() if name == "find" else found == {}
        assert name == "now" or (found["room"] in ("kitchen", "garden") and found["count"] in range(10))


def test_required_calls_are_valid_for_their_schemas(random_model):
    # both names are about as likely for this model, so that any random numbers give both
    even = {"temperature": 2, "logit_bias": {str(byte().encode("f")[0]): 3.6}}
    response = random_model.chat.completions.create(
        **ASK, **even, tool_choice="required", parallel_tool_calls=False, n=16, seed=1
    )
    names = set()
    for choice in response.choices:
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
        assert len(calls) == 1
        check(calls)
        names |= {name for name, _ in calls}
    assert names == {"find", "now"}


def test_a_named_function_is_called(random_model):
    named = {"type": "function", "function": {"name": "find"}}
    choice = random_model.chat.completions.create(**ASK, tool_choice=named).choices[0]
    check([(call.function.name, call.function.arguments) for call in choice.message.tool_calls])
    assert choice.message.tool_calls[0].function.name == "find" and len(choice.message.tool_calls) == 1
    named = {"type": "function", "name": "now"}
    response = random_model.responses.create(model="tiny", input="Now?", tools=FLAT, tool_choice=named)
    assert [(item.name, item.arguments) for item in response.output] == [("now", "{}")]
    assert response.tool_choice.name == "now"


def test_strict_functions_are_enforced_or_refused(random_model, request):
    strict = [{"type": "function", "function": FIND["function"] | {"strict": True}}]
    body = {"model": "tiny", "messages": [QUESTION], "tools": strict, "max_tokens": 8}
    if "mistral" in request.node.name:
        with pytest.raises(openai.BadRequestError, match=r"the mistral style .* special token, .* strict"):
            random_model.chat.completions.create(**body)
        return
    for choice in random_model.chat.completions.create(**body, n=4, seed=0).choices:
        assert choice.message.content and not choice.message.tool_calls
    if "llama3" in request.node.name:  # an output that begins with a brace is a call
        brace = {str(byte().encode("{")[0]): 100}
        body |= {"max_tokens": 99, "logit_bias": brace, "parallel_tool_calls": False}
        response = random_model.chat.completions.create(**body, n=4, seed=0)
        for choice in response.choices:
            assert choice.finish_reason == "tool_calls" and choice.message.content is None
            check([(call.function.name, call.function.arguments) for call in choice.message.tool_calls])


def test_schemas_that_cannot_be_enforced_are_refused(random_model):
    for parameters in ({"type": "string"}, {"type": "object", "not": {}}):
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        with pytest.raises(openai.BadRequestError):
            random_model.chat.completions.create(**ASK | {"tools": [tool]}, tool_choice="required")
