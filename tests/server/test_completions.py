"""POST /v1/completions: all forms of prompts, logprobs as parallel lists, streams equal to whole responses."""

import json

import httpx
import pytest
import tokenizers

from regard.server.app import create_app
from regard.server.served_model import ServedModel
from regard.text.tokenizer import Tokenizer
from tests.server.conftest import REPLY, serve, wait_until
from tests.server.fake_engine import FakeEngine
from tests.text.test_detokenizer import byte_fallback_tokenizer


def post(server, **body) -> dict:
    response = server.client.post("/v1/completions", json={"model": "tiny", "prompt": "Mira"} | body)
    assert response.status_code == 200, response.text
    return response.json()


def stream(server, path: str, **body) -> list[dict]:
    with server.client.stream("POST", path, json={"model": "tiny", "stream": True} | body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        blocks = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert blocks.pop() == "[DONE]"
    return [json.loads(block) for block in blocks]


def test_a_completion_ends_with_a_stop_token_or_at_the_limit(start_server):
    server = start_server()
    whole = post(server, max_tokens=100)
    assert whole["object"] == "text_completion" and whole["model"] == "tiny"
    assert whole["choices"] == [{"index": 0, "text": REPLY, "logprobs": None, "finish_reason": "stop"}]
    usage = whole["usage"]
    assert usage["completion_tokens"] == len(server.engine.script) + 1  # includes the stop token
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert post(server)["usage"]["completion_tokens"] == 16
    limited = post(server, max_tokens=2)["choices"][0]
    assert limited["finish_reason"] == "length" and REPLY.startswith(limited["text"])


def test_a_prompt_may_be_text_ids_or_a_list_of_them(start_server, tokenizer):
    server = start_server()
    ids = tokenizer.encode("Mira put")
    for prompt in ("Mira put", ids, ["Mira put"], [ids]):
        assert len(post(server, prompt=prompt)["choices"]) == 1
        assert server.engine.submitted[-1].ids == tuple(ids)
    many = post(server, prompt=["Mira", "the lamp"], n=2, seed=7)
    assert [choice["index"] for choice in many["choices"]] == [0, 1, 2, 3]
    assert [request.sampling.seed for request in server.engine.submitted[-4:]] == [7, 8, 7, 8]
    post(server, prompt="Mira", n=2, seed=-1)
    assert [request.sampling.seed for request in server.engine.submitted[-2:]] == [None, None]  # random, as in vLLM
    assert many["usage"]["prompt_tokens"] == len(tokenizer.encode("Mira")) + len(tokenizer.encode("the lamp"))


def test_sampling_settings_reach_the_engine(start_server, tokenizer):
    server = start_server()
    settings = {
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.1,
        "presence_penalty": 1,
        "frequency_penalty": -1,
    }
    settings |= {"repetition_penalty": 1.5, "seed": 2**63 - 1, "typical_p": 0.7}
    post(server, **settings, max_tokens=4, logprobs=3, logit_bias={"7": -100, "0": 2.5}, min_tokens=2)
    sampling = server.engine.submitted[-1].sampling
    assert sampling.logit_bias == {7: -100, 0: 2.5} and sampling.min_new == 2
    assert {key: getattr(sampling, key) for key in settings} == settings
    assert (sampling.max_new, sampling.top_logprobs, sampling.stop_ids) == (4, 3, (tokenizer.eos,))


def test_the_prefix_ids_of_the_tokenizer_precede_the_prompt(start_server, tokenizer):
    server = start_server()
    served = server.served.tokenizer
    served.bos = 2  # only names the token: the tokenizer's rules do not add it to a text
    post(server)
    assert server.engine.submitted[-1].ids == tuple(tokenizer.encode("Mira"))
    served.prefix_ids = (3,)
    post(server)
    assert server.engine.submitted[-1].ids == (3, *tokenizer.encode("Mira"))


def test_a_continuation_begins_with_its_space():
    tokenizer = byte_fallback_tokenizer()
    app = create_app([ServedModel("tiny", tokenizer, FakeEngine(tokenizer, "a", repeat=True))])
    with serve(app) as port:
        body = {"model": "tiny", "prompt": "a a", "max_tokens": 2}
        response = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60).json()
    assert response["choices"][0]["text"] == " a a"


def test_echo_repeats_the_prompt(start_server):
    choice = post(start_server(), prompt="Mira put", echo=True, max_tokens=1)["choices"][0]
    assert choice["text"].startswith("Mira put The")


def test_the_engine_may_ignore_the_stop_token(start_server):
    server = start_server()
    assert post(server, ignore_eos=True, max_tokens=100)["usage"]["completion_tokens"] == 100
    assert server.engine.submitted[-1].sampling.stop_ids == ()


def test_stop_token_ids_end_a_text_like_the_stop_token(start_server, tokenizer):
    server = start_server()
    whole = server.engine.script
    choice = post(server, stop_token_ids=[whole[3], 339], max_tokens=100)["choices"][0]
    assert choice["text"] == tokenizer.decode(whole[:3]) and choice["finish_reason"] == "stop"
    assert server.engine.submitted[-1].sampling.stop_ids == (tokenizer.eos, whole[3], 339)
    ignored = post(server, stop_token_ids=[339], ignore_eos=True, max_tokens=100)["choices"][0]
    assert ignored["finish_reason"] == "length"
    assert server.engine.submitted[-1].sampling.stop_ids == (339,)  # also then
    chat = {"messages": [{"role": "user", "content": "Where?"}], "stop_token_ids": [whole[3]]}
    answer = server.client.post("/v1/chat/completions", json=chat).json()["choices"][0]
    assert answer["message"]["content"] == tokenizer.decode(whole[:3])
    for wrong, message in (
        ([340], "id 340 is outside the vocabulary of 340; send ids of this model"),
        ([-1], "stop_token_ids.0"),
        (["a"], "stop_token_ids.0"),
        (list(range(129)), "stop_token_ids"),
        (7, "stop_token_ids"),
    ):
        response = server.client.post("/v1/completions", json={"prompt": "a", "stop_token_ids": wrong})
        error = response.json()["error"]
        assert response.status_code == 400 and error["param"].startswith("stop_token_ids"), wrong
        assert message in error["message"]


def test_echo_with_logprobs_has_those_of_the_prompt(start_server, tokenizer):
    server = start_server()
    choice = post(server, prompt="Mira put the lamp", echo=True, logprobs=1, max_tokens=3)["choices"][0]
    logprobs, length = choice["logprobs"], len(tokenizer.encode("Mira put the lamp"))
    assert "".join(logprobs["tokens"]) == choice["text"] and len(logprobs["tokens"]) == length + 3
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:length] == [-0.5] * (length - 1)
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"][offset : offset + len(token)] == token
    options = {"prompt": "Mira put the lamp", "echo": True, "logprobs": 1, "max_tokens": 3, "n": 2}
    chunks = [chunk["choices"][0] for chunk in stream(server, "/v1/completions", **options)]
    for index in (0, 1):
        parts = [chunk for chunk in chunks if chunk["index"] == index]
        assert "".join(part["text"] for part in parts) == choice["text"]
        for key in logprobs:
            assert [value for part in parts for value in part["logprobs"][key]] == logprobs[key]


def test_logprobs_are_parallel_lists(start_server):
    logprobs = post(start_server(), max_tokens=5, logprobs=2)["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == REPLY[: len("".join(logprobs["tokens"]))]
    assert all(len(logprobs[key]) == 5 for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"))
    assert all(
        len(top) == 2 and token in top for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True)
    )
    assert logprobs["text_offset"][1] == len(logprobs["tokens"][0])


def test_stop_string_is_cut_off_and_frees_the_engine(start_server):
    server = start_server(repeat=True)
    choice = post(server, stop=["en, sa", "zzz"], max_tokens=1000)["choices"][0]
    assert choice["text"] == " The lamp is in the gard" and choice["finish_reason"] == "stop"
    wait_until(lambda: server.engine.idle)  # the request is cancelled after the response is sent


@pytest.mark.parametrize("reply", [REPLY, "snow ☃ and 🙂 and <b>html</b>\n\n", "\u2028 \r\n data: [DONE]\n\n end"])
def test_a_stream_equals_the_whole_response(start_server, reply):
    server = start_server(reply)
    whole = post(server, max_tokens=200, logprobs=1)["choices"][0]
    chunks = stream(
        server, "/v1/completions", prompt="Mira", max_tokens=200, logprobs=1, stream_options={"include_usage": True}
    )
    *parts, last = chunks
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == len(server.engine.script) + 1
    choices = [chunk["choices"][0] for chunk in parts]
    assert "".join(choice["text"] for choice in choices) == whole["text"] == reply
    for key in ("tokens", "token_logprobs", "text_offset"):
        assert [value for choice in choices for value in choice["logprobs"][key]] == whole["logprobs"][key]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]


def test_a_suffix_needs_a_model_that_can_infill(start_server, tokenizer):
    refused = start_server().client.post("/v1/completions", json={"model": "tiny", "prompt": "Mira", "suffix": " end"})
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "suffix_not_supported"
    core = tokenizers.Tokenizer.from_str(tokenizer.core.to_str())
    core.add_special_tokens(["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|endoftext|>"])
    coder, engine = Tokenizer(core, eos="<|end|>"), FakeEngine(tokenizer, "the lamp")
    engine.vocab = coder.vocab_size
    with serve(create_app([ServedModel("tiny", coder, engine)])) as port:
        url = f"http://127.0.0.1:{port}/v1/completions"
        body = {"model": "tiny", "prompt": ["Mira put", "She put"], "suffix": " into the box."}
        choices = httpx.post(url, json=body, timeout=60).json()["choices"]
        assert [choice["text"] for choice in choices] == ["the lamp"] * 2
        prompt = coder.decode(list(engine.submitted[0].ids), special=True)
        assert prompt == "<|fim_prefix|>Mira put<|fim_suffix|> into the box.<|fim_middle|>"
        assert engine.submitted[0].sampling.stop_ids == (coder.eos, core.token_to_id("<|endoftext|>"))
        for wrong in ({"echo": True}, {"prompt": [1, 2]}):
            assert httpx.post(url, json=body | wrong, timeout=60).status_code == 400
