"""Structured output over HTTP: a random model whose output is valid for schemas, expressions, choices and grammars."""

import json
import re

import openai
import pytest

from regard.engine.engine import Engine
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import SwiGLU
from regard.server.app import create_app
from regard.server.served_model import ServedModel
from regard.text.train import byte
from tests.server.conftest import serve

SCHEMA = {
    "type": "object",
    "properties": {"room": {"enum": ["kitchen", "garden"]}, "count": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["room", "count"],
    "additionalProperties": False,
}
QUESTION = [{"role": "user", "content": "Where?"}]


@pytest.fixture(scope="module")
def client():
    block = Block((Sublayer(Attention(heads=2)), Sublayer(SwiGLU(16))))
    model = Decoder(vocab=261, width=16, layers=(Repeat((block,)),), context=256).build(seed=0)
    app = create_app([ServedModel("small", byte(), Engine(model, rows=4))])
    with (
        serve(app) as port,
        openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="k", max_retries=0) as client,
    ):
        yield client


def check(text: str) -> None:
    found = json.loads(text)
    assert found.keys() == SCHEMA["properties"].keys() and found["room"] in ("kitchen", "garden")
    assert found["count"] in range(10)


def test_chat_answers_with_json_of_the_schema(client):
    format = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
    response = client.chat.completions.create(model="small", messages=QUESTION, n=4, seed=1, response_format=format)
    for choice in response.choices:
        check(choice.message.content)
        assert choice.finish_reason == "stop"


def test_a_response_and_its_stream_have_the_format(client):
    text = {"format": {"type": "json_schema", "name": "place", "schema": SCHEMA}}
    response = client.responses.create(model="small", input="Where?", text=text)
    check(response.output_text)
    assert response.text.format.type == "json_schema" and response.text.format.schema_ == SCHEMA
    with client.responses.stream(model="small", input="Where?", text=text) as stream:
        check(stream.get_final_response().output_text)


@pytest.mark.parametrize(
    ("outputs", "pattern"),
    [
        ({"regex": "[0-9]{3}-[a-c]{2}"}, "[0-9]{3}-[a-c]{2}"),
        ({"choice": ["yes", "no", "perhaps"]}, "yes|no|perhaps"),
        ({"grammar": 'root ::= "(" root ")" | "x"'}, r"\(*x\)*"),
        ({"json": {"type": "boolean"}}, "true|false"),
    ],
)
def test_completions_and_chat_have_structured_outputs(client, outputs, pattern):
    extra = {"structured_outputs": outputs}
    completion = client.completions.create(model="small", prompt="Mira", max_tokens=100, seed=2, extra_body=extra)
    chat = client.chat.completions.create(model="small", messages=QUESTION, max_tokens=100, seed=3, extra_body=extra)
    for choice, text in [
        (completion.choices[0], completion.choices[0].text),
        (chat.choices[0], chat.choices[0].message.content),
    ]:
        assert choice.finish_reason == "length" or re.fullmatch(pattern, text)
        assert choice.finish_reason == "stop" or "grammar" in outputs  # only nested brackets may be too long


@pytest.mark.parametrize(
    "change",
    [
        {"response_format": {"type": "xml"}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "colour"}}}},
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        {"structured_outputs": {}},
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        {"structured_outputs": {"regex": "("}},
        {"structured_outputs": {"grammar": "root ::= other"}},
        {"structured_outputs": {"regex": "a" * 100_000}},
    ],
)
def test_invalid_formats_are_refused(client, change):
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="small", messages=QUESTION, extra_body=change)
