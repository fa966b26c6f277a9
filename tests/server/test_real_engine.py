"""The server with the real engine and lens: text and maps over HTTP equal those of the model without a server."""

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import pytest
import torch

from regard.engine.engine import Engine
from regard.engine.request import Sampling
from regard.language_model import LanguageModel
from regard.lens import RecordedAttention, attention_layers, attention_maps
from regard.models.decoder import Decoder
from regard.models.seq2seq import seq2seq
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import SwiGLU
from regard.parts.linear_attention import LinearAttention
from regard.parts.position.rope import Rope
from regard.server.app import create_app
from regard.server.binary_arrays import decode_arrays
from regard.server.lens_thread import Lens
from regard.server.served_model import ServedModel
from regard.text.tokenizer_folder import GenerationConfig
from regard.text.train import byte
from tests.laws import randomize_weights
from tests.server.conftest import serve, wait_until


@pytest.fixture(scope="module")
def model():
    attention = Block((Sublayer(Attention(heads=4, kv_heads=2, position=Rope())), Sublayer(SwiGLU(48))))
    recurrent = Block((Sublayer(LinearAttention(heads=4)), Sublayer(SwiGLU(48))))
    return Decoder(vocab=261, width=32, layers=(Repeat((attention, recurrent)),), context=96).build(seed=3).double()


@pytest.fixture(scope="module")
def client(model):
    lens = Lens(partial(RecordedAttention, model), attention_layers(model), 261)
    app = create_app([ServedModel("small", byte(), Engine(model, rows=4), lens=lens)])
    with serve(app) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        yield client


def test_greedy_text_over_http_equals_that_of_the_engine(client, model):
    tokenizer = byte()
    prompts = ["Mira", "the red lamp", "in the garden with Tomas"]
    body = {"model": "small", "prompt": prompts, "max_tokens": 12, "temperature": 0, "logprobs": 3}
    choices = client.post("/v1/completions", json=body).json()["choices"]
    for prompt, choice in zip(prompts, choices, strict=True):
        sampling = Sampling(max_new=12, temperature=0, stop_ids=tokenizer.stop_ids, top_logprobs=3)
        tokens = Engine(model).generate(tokenizer.encode(prompt), sampling)
        visible = [token for token in tokens if token.id not in tokenizer.stop_ids]
        assert choice["text"] == tokenizer.decode([token.id for token in visible])
        expected = torch.tensor([token.logprob for token in visible])
        torch.testing.assert_close(torch.tensor(choice["logprobs"]["token_logprobs"]), expected)


def test_logprobs_of_an_echoed_prompt_equal_those_of_the_model(client, model):
    ids = byte().encode("the red lamp")
    body = {"model": "small", "prompt": "the red lamp", "echo": True, "logprobs": 2, "max_tokens": 1}
    body["return_token_ids"] = True
    logprobs = client.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    with torch.no_grad():
        expected = model(torch.tensor([ids])).log_softmax(-1)[0, :-1]  # (L - 1, V)
    found = torch.tensor(logprobs["token_logprobs"][1 : len(ids)]).double()
    torch.testing.assert_close(found, expected[range(len(ids) - 1), ids[1:]], atol=1e-6, rtol=0)
    best = torch.tensor([max(top.values()) for top in logprobs["top_logprobs"][1 : len(ids)]]).double()
    torch.testing.assert_close(best, expected.amax(-1), atol=1e-6, rtol=0)
    ranks = [entry["rank"] for entry in logprobs["content"][1 : len(ids)]]
    assert ranks == [int((row > row[id]).sum()) + 1 for row, id in zip(expected, ids[1:], strict=True)]
    entropies = torch.tensor([entry["entropy"] for entry in logprobs["content"][1 : len(ids)]]).double()
    torch.testing.assert_close(entropies, -(expected.exp() * expected).sum(-1), atol=1e-5, rtol=0)


def test_the_best_samples_have_the_largest_mean_logprob(client):
    body = {"model": "small", "prompt": ["Mira", "the lamp"], "max_tokens": 6, "seed": 3, "logprobs": 0}
    response = client.post("/v1/completions", json=body | {"n": 4}).json()
    best = client.post("/v1/completions", json=body | {"n": 2, "best_of": 4}).json()
    expected = []
    for samples in (response["choices"][:4], response["choices"][4:]):
        means = [sum(c["logprobs"]["token_logprobs"]) / len(c["logprobs"]["token_logprobs"]) for c in samples]
        order = sorted(range(4), key=lambda i: -means[i])
        assert order[:2] != [0, 1]  # else this test would show nothing
        expected += [samples[i] for i in order[:2]]
    assert [choice["text"] for choice in best["choices"]] == [choice["text"] for choice in expected]
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]
    assert best["usage"] == response["usage"]


def test_a_bias_excludes_and_forces_tokens(client):
    body = {"model": "small", "prompt": "Mira", "max_tokens": 8}
    assert client.post("/v1/completions", json=body | {"logit_bias": {"70": 100}}).json()["choices"][0]["text"] == (
        byte().decode([70] * 8)
    )
    assert client.post("/v1/completions", json=body | {"logit_bias": {"261": 1}}).status_code == 400


def test_a_seeded_stream_equals_the_whole_response(client):
    body = {"model": "small", "messages": [{"role": "user", "content": "where?"}], "seed": 5, "max_tokens": 20}
    whole = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
        blocks = [line.removeprefix("data: ") for line in response.iter_lines() if line][:-1]
    deltas = [json.loads(block)["choices"][0]["delta"].get("content", "") for block in blocks]
    assert "".join(deltas) == whole


def test_maps_over_http_equal_the_lens(client, model):
    facts = client.get("/regard/model").json()
    assert facts["heads"] == [4, 4] and facts["context"] == 96
    ids = client.post("/regard/tokenize", json={"text": "the lamp"}).json()["ids"]
    found = head_weights(client.post("/regard/attention/head", json={"ids": ids, "layer": 0, "head": 3}))
    torch.testing.assert_close(found, attention_maps(model, ids)[0][3], atol=1e-6, rtol=0)
    header, _ = decode_arrays(client.post("/regard/attention/overview", json={"ids": ids}).content)
    assert [layer["heads"] for layer in header["layers"]] == [4, 4]


def head_weights(response: httpx.Response) -> torch.Tensor:
    return decode_arrays(response.content)[1]["weights"].double()


def test_maps_and_streams_at_the_same_time_equal_each_alone(client, model):
    """The lens records with hooks; the engine runs the same weights in another thread."""
    completion = {"model": "small", "prompt": "Mira", "max_tokens": 60, "temperature": 0}
    expected = client.post("/v1/completions", json=completion).json()["choices"][0]["text"]
    passages = [[5 + i % 90 for i in range(9 * length)] for length in range(1, 9)]
    with ThreadPoolExecutor(4) as threads:
        streams = [threads.submit(client.post, "/v1/completions", json=completion) for _ in range(6)]
        bodies = [{"ids": ids, "layer": 0, "head": 1} for ids in passages]
        maps = [threads.submit(client.post, "/regard/attention/head", json=body) for body in bodies]
    for stream in streams:
        assert stream.result().json()["choices"][0]["text"] == expected
    for ids, found in zip(passages, maps, strict=True):
        expected_weights = attention_maps(model, ids)[0][1]
        torch.testing.assert_close(head_weights(found.result()), expected_weights, atol=1e-6, rtol=0)


def test_the_engine_makes_steps_while_an_overview_is_computed() -> None:
    """The forward of a text and the maps of its layers wait for steps, so they must hold no lock of the engine."""
    block = Block((Sublayer(Attention(heads=8, position=Rope())), Sublayer(SwiGLU(64))))
    model = Decoder(vocab=261, width=64, layers=(Repeat((block,), 4),), context=10_000).build(seed=3)
    engine, waited = Engine(model, rows=2), []

    def wait_for_steps() -> None:
        begin = engine.counts["steps"]
        wait_until(lambda: engine.counts["steps"] > begin + 1)
        waited.append(begin)

    class Waiting(RecordedAttention):
        def __init__(self, *args):
            super().__init__(*args)
            wait_for_steps()

        def weights(self, *args):
            wait_for_steps()
            return super().weights(*args)

    served = ServedModel("small", byte(), engine, lens=Lens(partial(Waiting, model), attention_layers(model), 261))
    body = {"model": "small", "prompt": "Mira", "max_tokens": 9000, "ignore_eos": True, "stream": True}
    with (
        serve(create_app([served])) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client,
        client.stream("POST", "/v1/completions", json=body) as stream,
    ):
        lines = stream.iter_lines()  # kept, because the stream is closed with it
        next(lines)
        overview = client.post("/regard/attention/overview", json={"ids": [50] * 90})
        assert overview.status_code == 200
    assert len(waited) == 5


def test_a_prompt_that_does_not_fit_is_refused(client):
    body = {"model": "small", "prompt": "x" * 96, "max_tokens": 1}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded"
    assert client.post("/v1/completions", json=body | {"prompt": "x" * 95}).status_code == 200
    assert client.post("/v1/completions", json=body | {"prompt": [261]}).status_code == 400
    assert "regard_engine_new_tokens" in client.get("/metrics").text


@pytest.fixture(scope="module")
def translator() -> LanguageModel:
    model = seq2seq(261, 24, attention="additive").build(seed=4).double()
    randomize_weights(model, seed=1)
    unreadable = tuple(id for id in range(261) if not byte().decode([id]).isalpha())
    settings = GenerationConfig(decoder_start_token_id=70, forced_bos_token_id=71, suppress_tokens=unreadable)
    return LanguageModel(model, byte(), context=40, rows=3, generation=settings)


def test_an_encoder_decoder_reads_the_prompt_as_its_source(translator) -> None:
    """A prompt does not count against the tokens of the output, and the output does not continue it."""
    llm = translator
    prompts = ["Mira", "the red lamp", "in the garden with Tomas"]
    expected = llm.generate(prompts, max_new=30, temperature=0)
    app = create_app([ServedModel("small", llm.tokenizer, llm.engine, submit_source=llm.submit_source)])
    with serve(app) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        body = {"model": "small", "prompt": prompts, "max_tokens": 30, "temperature": 0}
        response = client.post("/v1/completions", json=body).json()
        assert [choice["text"] for choice in response["choices"]] == expected and len(set(expected)) == 3
        assert response["usage"]["prompt_tokens"] == sum(len(llm.encode(prompt)) for prompt in prompts)
        for change in ({"prompt": "a" * 41}, {"prompt": "a", "max_tokens": 40}, {"prompt": "a" * 4000}):
            refused = client.post("/v1/completions", json=body | change)
            assert refused.status_code == 400, refused.text
        assert client.post("/regard/attention/overview", json={"ids": [5]}).status_code == 404


def test_an_encoder_decoder_streams_samples_and_has_logprobs(translator) -> None:
    translator = LanguageModel(translator.model, byte(), 40, 3, translator.generation)  # an engine of its own
    app = create_app([ServedModel("small", byte(), translator.engine, submit_source=translator.submit_source)])
    with serve(app) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        body = {"model": "small", "prompt": "the red lamp", "max_tokens": 12, "seed": 5, "n": 3, "logprobs": 2}
        whole = client.post("/v1/completions", json=body).json()
        assert len({choice["text"] for choice in whole["choices"]}) == 3
        source = len(translator.encode("the red lamp"))
        assert whole["usage"]["prompt_tokens"] == source and whole["usage"]["completion_tokens"] <= 36
        texts = ["", "", ""]
        with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
            for line in stream.iter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        texts[choice["index"]] += choice["text"]
        assert texts == [choice["text"] for choice in whole["choices"]]
        for choice in whole["choices"]:
            logprobs = choice["logprobs"]
            assert "".join(logprobs["tokens"]) == choice["text"] and max(logprobs["token_logprobs"]) <= 0
            assert all(len(top) >= 2 for top in logprobs["top_logprobs"])
        messages = [{"role": "user", "content": "a"}]
        for path, change, code in [
            ("/v1/completions", {"prompt": "a", "echo": True}, "echo_not_supported"),
            ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix_not_supported"),
            ("/v1/chat/completions", {"messages": messages}, "no_chat"),
            ("/v1/responses", {"input": "a"}, "no_chat"),
        ]:
            refused = client.post(path, json={"model": "small"} | change)
            assert refused.status_code == 400 and refused.json()["error"]["code"] == code, refused.text
        assert client.get("/regard/model").json()["chat"] is False
