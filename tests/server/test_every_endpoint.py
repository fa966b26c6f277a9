"""The official `openai` client over every endpoint and option, against real engines: three models in one server.

Routes that the client does not have (rerank, tokenize, health, metrics …) are called by httpx.
"""

import json

import httpx
import openai
import pytest

from regard.engine.engine import Engine
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.position.rope import Rope
from regard.server.app import create_app
from regard.server.network_options import NetworkOptions
from regard.server.served_model import ServedModel, TextEncoder
from regard.speech.transcribe import speech_model
from regard.text.tokenizer import Tokenizer
from regard.text.train import byte
from tests.server.conftest import serve
from tests.server.fake_engine import fake_embeddings
from tests.server.test_tools import HERMES
from tests.speech.audio_files import noise, wav

INFILLING = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
QUESTION = {"role": "user", "content": "Where is the lamp?"}
FIND = {
    "name": "find",
    "parameters": {
        "type": "object",
        "properties": {"room": {"enum": ["kitchen", "garden"]}},
        "required": ["room"],
        "additionalProperties": False,
    },
}
TOOLS = [{"type": "function", "function": FIND}]


@pytest.fixture(scope="module")
def url(whisper):
    core = byte().core
    core.add_special_tokens(INFILLING)
    tokenizer = Tokenizer(core, eos="<|end|>", chat_template=HERMES)
    block = Block((Sublayer(Attention(heads=2, position=Rope())),))
    model = Decoder(vocab=tokenizer.vocab_size, width=16, layers=(Repeat((block,)),), context=1024).build(seed=0)
    encoder = ServedModel("encoder", byte(), encoder=TextEncoder(fake_embeddings, context=64))
    speech = speech_model(whisper.model, whisper.tokenizer, engine := Engine(whisper.model, rows=2))
    listener = ServedModel("whisper", whisper.tokenizer, engine, speech=speech)
    small = ServedModel("small", tokenizer, Engine(model, rows=4))
    with serve(create_app([small, encoder, listener], NetworkOptions(keys=("k",)))) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=url + "/v1", api_key="k", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def web(url):
    with httpx.Client(base_url=url, headers={"authorization": "Bearer k"}, timeout=60) as web:
        yield web


def test_models(client):
    assert [model.id for model in client.models.list()] == ["small", "encoder", "whisper"]
    assert client.models.retrieve("encoder").object == "model"


def test_completions_have_all_options(client):
    settings = {"model": "small", "prompt": "the lamp", "max_tokens": 6, "seed": 1}
    plain = client.completions.create(**settings)
    assert plain.choices[0].finish_reason in ("stop", "length") and plain.usage.prompt_tokens == 8
    assert client.completions.create(**settings).choices[0].text == plain.choices[0].text  # by its seed
    echoed = client.completions.create(**settings, echo=True, logprobs=2).choices[0]
    assert echoed.text.startswith("the lamp") and echoed.logprobs.token_logprobs[0] is None
    assert len(echoed.logprobs.top_logprobs[1]) == 2
    several = client.completions.create(**settings | {"prompt": ["a", "b"]}, n=2)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert len(client.completions.create(**settings, best_of=3).choices) == 1
    assert client.completions.create(**settings, suffix=" is red.").usage.prompt_tokens == 8 + 8 + 3
    assert client.completions.create(**settings | {"prompt": [97, 98]}).usage.prompt_tokens == 2
    extra = {"top_k": 5, "min_p": 0.01, "typical_p": 0.9, "repetition_penalty": 1.1, "min_tokens": 6}
    long = client.completions.create(
        **settings, temperature=0.7, top_p=0.9, presence_penalty=0.1, frequency_penalty=0.1, user="me",
        logit_bias={"97": 1}, stop=["never"], extra_body=extra | {"cache_salt": "s", "priority": 1, "timeout": 60},
    )  # fmt: skip
    assert long.usage.completion_tokens == 6
    chunks = list(client.completions.create(**settings, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == plain.choices[0].text
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens


def test_chat_has_all_options(client):
    settings = {"model": "small", "messages": [QUESTION], "max_completion_tokens": 6, "seed": 1}
    plain = client.chat.completions.create(**settings)
    chunks = list(client.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == plain.choices[0].message.content and chunks[-1].usage.total_tokens == plain.usage.total_tokens
    several = client.chat.completions.create(**settings, n=3, logprobs=True, top_logprobs=2)
    assert len(several.choices) == 3 and len(several.choices[0].logprobs.content[0].top_logprobs) == 2
    parts = [{"type": "text", "text": "Where is "}, {"type": "text", "text": "the lamp?"}]
    same = client.chat.completions.create(**settings | {"messages": [{"role": "user", "content": parts}]})
    assert same.choices[0].message.content == plain.choices[0].message.content
    messages = [{"role": "system", "content": "Be brief."}, QUESTION, plain.choices[0].message, QUESTION]
    assert client.chat.completions.create(**settings | {"messages": messages}).usage.prompt_tokens > 30
    schema = {"type": "json_schema", "json_schema": {"name": "place", "schema": FIND["parameters"], "strict": True}}
    settings.pop("max_completion_tokens")
    answer = client.chat.completions.create(**settings, response_format=schema).choices[0].message.content
    assert json.loads(answer)["room"] in ("kitchen", "garden")
    choice = client.chat.completions.create(**settings, extra_body={"structured_outputs": {"choice": ["yes", "no"]}})
    assert choice.choices[0].message.content in ("yes", "no")


@pytest.mark.parametrize("tool_choice", ["required", {"type": "function", "function": {"name": "find"}}])
def test_chat_calls_tools(client, tool_choice):
    settings = {"model": "small", "tools": TOOLS, "tool_choice": tool_choice, "parallel_tool_calls": False, "seed": 1}
    choice = client.chat.completions.create(**settings, messages=[QUESTION]).choices[0]
    call = choice.message.tool_calls[0]
    assert choice.finish_reason == "tool_calls" and json.loads(call.function.arguments)["room"] in ("kitchen", "garden")
    result = {"role": "tool", "tool_call_id": call.id, "content": "It is there."}
    again = {**settings, "tool_choice": "none", "messages": [QUESTION, choice.message, result]}
    assert client.chat.completions.create(**again, max_tokens=4).choices[0].message.tool_calls is None
    with client.chat.completions.stream(**settings, messages=[QUESTION]) as stream:
        streamed = stream.get_final_completion().choices[0].message.tool_calls[0]
    assert streamed.function.arguments == call.function.arguments


def test_responses(client):
    plain = client.responses.create(model="small", input="Where?", instructions="Be brief.", max_output_tokens=5)
    assert plain.status in ("completed", "incomplete")
    assert plain.usage.input_tokens_details.cached_tokens < plain.usage.input_tokens
    greedy = {"model": "small", "input": "Where?", "max_output_tokens": 5, "temperature": 0}
    final = list(client.responses.create(**greedy, stream=True))[-1].response
    assert final.output_text == client.responses.create(**greedy).output_text
    tools = [{"type": "function", **FIND, "strict": True}]
    items = [QUESTION]
    called = client.responses.create(model="small", input=items, tools=tools, tool_choice="required")
    call = called.output[0]
    assert call.type == "function_call" and json.loads(call.arguments)["room"] in ("kitchen", "garden")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "There."}
    last = client.responses.create(model="small", input=[*items, *called.output, result], max_output_tokens=3)
    assert last.output[0].type == "message"
    format = {"format": {"type": "json_schema", "name": "place", "schema": FIND["parameters"]}}
    assert "room" in json.loads(client.responses.create(model="small", input="Where?", text=format).output_text)


def test_embeddings_and_rerank(client, web):
    found = client.embeddings.create(model="encoder", input=["a lamp", "a box"])
    assert len(found.data) == 2 and len(found.data[0].embedding) == 4
    plain = client.embeddings.create(model="encoder", input="a lamp", encoding_format="float")
    assert plain.data[0].embedding == pytest.approx(found.data[0].embedding)
    body = {"model": "encoder", "query": "a lamp", "documents": ["a lamp", "a very long document"], "top_n": 1}
    assert web.post("/v1/rerank", json=body).json()["results"][0]["index"] == 0


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # the client deprecates translations
def test_audio(client):
    """More in test_transcriptions.py."""
    file = ("a.wav", wav(noise(0.5)), "audio/wav")
    for create in (client.audio.transcriptions.create, client.audio.translations.create):
        plain = create(model="whisper", file=file, temperature=0.5, prompt="Anna")
        assert create(model="whisper", file=file, temperature=0.5, prompt="Anna").text == plain.text
        for format in ("text", "srt", "vtt"):
            assert isinstance(create(model="whisper", file=file, temperature=0.5, response_format=format), str)
        assert create(model="whisper", file=file, temperature=0.5, response_format="verbose_json").duration == 0.5


def test_the_other_routes(web):
    ids = web.post("/tokenize", json={"model": "small", "prompt": "lamp"}).json()["tokens"]
    assert web.post("/detokenize", json={"model": "small", "tokens": ids}).json()["prompt"] == "lamp"
    chat = web.post("/tokenize", json={"model": "small", "messages": [QUESTION]}).json()["tokens"]
    assert len(chat) > len(ids)
    for path in ("/health", "/ready"):
        assert web.get(path).json() == {"status": "ok"}
    metrics = web.get("/metrics").text
    assert 'regard_engine_new_tokens_total{model="small"}' in metrics
    assert set(web.get("/openapi.json").json()["paths"]) >= {"/v1/chat/completions", "/v1/responses", "/v1/rerank"}


def test_what_a_model_cannot_do_is_refused_by_name(client):
    for call, settings in [
        (client.completions.create, {"model": "encoder", "prompt": "a"}),
        (client.embeddings.create, {"model": "small", "input": "a"}),
        (client.audio.transcriptions.create, {"model": "small", "file": b"RIFF"}),
        (client.completions.create, {"model": "nothing", "prompt": "a"}),
    ]:
        with pytest.raises(openai.NotFoundError):
            call(**settings)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="small", messages=[QUESTION], store=True)
    assert caught.value.param == "store" and caught.value.request_id.startswith("req_")
