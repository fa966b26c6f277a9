"""The routes behind the page's Inside view equal the functions of the lens and the planner."""

import json

import httpx
import pytest
import torch

from regard.engine.engine import Engine
from regard.language_model import LanguageModel
from regard.lens import activation_patching, logit_difference, logit_lens, patch
from regard.lens.recorded_residual import RecordedResidual
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.seq2seq import seq2seq
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import SwiGLU
from regard.parts.input import Tokens
from regard.parts.linear_attention import LinearAttention
from regard.parts.position.rope import Rope
from regard.planning.part_tree import part_tree
from regard.server.app import create_app
from regard.server.inside_routes import positions_of
from regard.server.inside_schema import LensBody
from regard.server.inside_work import PromptPair
from regard.server.served_model import Inspected, ServedModel, TextEncoder
from regard.text.chat import DEFAULT_TEMPLATE
from regard.text.tokenizer import Tokenizer
from regard.text.tokenizer_folder import GenerationConfig
from regard.text.train import byte
from tests.laws import randomize_weights
from tests.server.conftest import serve, wait_until

CLEAN, CORRUPTED = "the red lamp", "the old lamp"
PROMPTS = {"model": "small", "clean": CLEAN, "corrupted": CORRUPTED}


def events(response: httpx.Response) -> list[dict]:
    assert response.status_code == 200, response.text
    lines = [line[6:] for line in response.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def models():
    attention = Block((Sublayer(Attention(heads=4, kv_heads=2, position=Rope())), Sublayer(SwiGLU(48))))
    recurrent = Block((Sublayer(LinearAttention(heads=4)), Sublayer(SwiGLU(48))))
    hybrid = Decoder(261, 32, (Repeat((attention, recurrent), 2),), context=96).build(seed=3)
    encoder = Encoder(Tokens(261), 32, (Repeat((attention,), 2),)).build(seed=4)
    translator = seq2seq(261, 16).build(seed=5)
    for model in (hybrid, encoder, translator):
        randomize_weights(model, seed=6)
    return hybrid.eval(), encoder.eval(), translator.eval()


@pytest.fixture(scope="module")
def served(models):
    hybrid, encoder, translator = models
    broken = Decoder(250, 16, (Repeat((Block((Sublayer(SwiGLU(24)),)),), 1),), context=96).build(seed=7).eval()
    with torch.no_grad():
        broken.stack.blocks[0].sublayers[0].body.down_proj.weight.fill_(torch.nan)
    tokenizer = Tokenizer(byte().core, eos="<|end|>", chat_template=DEFAULT_TEMPLATE)
    llm = LanguageModel(translator, byte(), 64, generation=GenerationConfig(decoder_start_token_id=7))
    return [
        ServedModel("small", tokenizer, Engine(hybrid, rows=2), inspected=Inspected(hybrid)),
        ServedModel("encoder", byte(), encoder=TextEncoder(lambda texts: None), inspected=Inspected(encoder)),
        ServedModel("translator", byte(), llm.engine, submit_source=llm.submit_source,
                    inspected=Inspected(translator, llm.decoder_start)),
        ServedModel("closed", byte(), Engine(hybrid, rows=2)),
        ServedModel("broken", byte(), encoder=TextEncoder(lambda texts: None), inspected=Inspected(broken)),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def client(served):
    with serve(create_app(served)) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        yield client


def test_the_spec_is_the_tree_of_parts_with_shapes_and_sources(client, models):
    found = client.get("/regard/spec", params={"length": 40}).json()
    shapes = found.pop("shapes")
    assert found == json.loads(json.dumps(part_tree(models[0].spec, 40)))
    assert shapes["stack.blocks.0.sublayers.0.body.pattern"] == ["B", 4, "L", "L"]
    assert shapes["stack.blocks.0.sublayers.0.body.k"] == ["B", 2, "L", 8]
    for name, stacks in {"encoder": [""], "translator": ["source", "target"]}.items():
        tree = client.get("/regard/spec", params={"model": name}).json()
        assert [stack["name"] for stack in tree["stacks"]] == stacks and tree["shapes"]


def test_the_lens_equals_the_logit_lens_of_the_model(client, models):
    body = {"model": "small", "start": 3, "stop": 9, "top": 4}
    first, *layers = events(client.post("/regard/lens", json=body | {"text": CLEAN}))
    ids = byte().encode(CLEAN)
    assert first["ids"] == ids and "".join(first["tokens"]) == CLEAN and first["positions"] == [3, 9]
    recorded = RecordedResidual(models[0], ids)
    torch.testing.assert_close(torch.tensor(first["norms"]), recorded.norms(), atol=1e-3, rtol=1e-4)
    best = recorded.largest(1)[0]
    place = [recorded.names.index(best.name), best.position, best.channel]
    assert [first["largest"][0][name] for name in ("layer", "position", "channel")] == place
    expected = [logits[0, 3:9].softmax(-1) for logits in logit_lens(models[0], ids).values()]
    assert [layer["depth"] for layer in layers] == [4, 3, 2, 1, 0]
    for layer in layers:
        top = expected[layer["depth"]].topk(4)
        torch.testing.assert_close(torch.tensor(layer["probabilities"]), top.values, atol=2e-5, rtol=0)
        assert layer["top"] == [[byte().decode_token(id) for id in row] for row in top.indices.tolist()]
    assert set(layers[0]["rank"]) == {0}
    assert events(client.post("/regard/lens", json=body | {"ids": ids})) == [first, *layers]


def test_a_text_can_be_the_message_of_a_chat(client):
    first = events(client.post("/regard/lens", json={"model": "small", "text": "hi", "chat": True, "logits": False}))[0]
    assert first["tokens"][0] == "<|user|>" and first["tokens"][-1] == "<|assistant|>"


def test_effects_equal_activation_patching(client, models):
    body = PROMPTS | {"answer": "e", "wrong": "q"}
    first, *rows = events(client.post("/regard/patch", json=body))
    tokenizer = byte()
    metric = logit_difference(tokenizer.encode("e")[0], tokenizer.encode("q")[0])
    expected = activation_patching(models[0], tokenizer.encode(CLEAN), tokenizer.encode(CORRUPTED), metric)
    assert first["names"] == list(expected.effects) and [row["row"] for row in rows] == list(range(5))
    found = torch.tensor([row["effects"] for row in rows])
    torch.testing.assert_close(found, expected.matrix, atol=1e-3, rtol=1e-3)
    assert first["clean"] == pytest.approx(expected.clean, abs=1e-4)


def test_one_cell_shows_how_the_answer_changes(client, models):
    body = PROMPTS | {"answer": "e", "wrong": "q", "layer": 2, "position": 5, "top": 3}
    (found,) = events(client.post("/regard/patch", json=body))
    hybrid, clean, corrupted = models[0], *(torch.tensor([byte().encode(text)]) for text in (CLEAN, CORRUPTED))
    recorded = RecordedResidual(hybrid, clean[0].tolist()).streams[2]

    def edit(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[:, :5], recorded[None, 5:6], x[:, 6:]], 1)

    with torch.no_grad(), patch(hybrid, {"stack.blocks.1": edit}):
        expected = hybrid(corrupted)[0, -1].softmax(-1).topk(3)
    assert [entry["id"] for entry in found["patched_top"]] == expected.indices.tolist()
    probabilities = torch.tensor([entry["probability"] for entry in found["patched_top"]])
    torch.testing.assert_close(probabilities, expected.values, atol=1e-5, rtol=0)
    assert {"clean_top", "corrupted_top"} <= found.keys()


def test_answer_and_wrong_are_by_default_the_predictions(client):
    first = events(client.post("/regard/patch", json=PROMPTS | {"corrupted": "xxxxxxxxxxxx"}))[0]
    assert first["answer"] == first["clean_top"][0]["token"] and first["wrong"] == first["corrupted_top"][0]["token"]


def test_a_vocabulary_of_few_tokens_has_fewer_candidates(models):
    tiny = Decoder(7, 16, (Repeat((Block((Sublayer(Attention(2)),)),)),)).build(seed=0)
    pair = PromptPair(Inspected(tiny), byte(), [1, 2], [3, 2])
    assert len(pair.next_tokens(pair.clean, 20)) == 7


def test_encoders_have_norms_and_say_why_they_have_no_predictions(client):
    first, failure = events(client.post("/regard/lens", json={"model": "encoder", "text": CLEAN}))
    assert len(first["norms"]) == 3 and "no head for tokens" in failure["error"]["message"]
    response = client.post("/regard/patch", json={"model": "encoder", "clean": CLEAN, "corrupted": CORRUPTED})
    assert response.status_code == 400 and "predicts no next token" in response.json()["error"]["message"]


def test_encoder_decoders_are_read_on_both_sides_and_patched_in_the_source(client, models):
    translator, source = models[2], byte().encode_with_special_tokens(CLEAN)
    first = events(client.post("/regard/lens", json={"model": "translator", "text": CLEAN, "logits": False}))[0]
    assert first["ids"] == source
    body = {"model": "translator", "text": CLEAN, "target": "ab"}
    first, *layers = events(client.post("/regard/lens", json=body))
    assert first["ids"] == [7, *byte().encode("ab")]
    expected = RecordedResidual(translator, (source, first["ids"]), "target")
    final = expected.predictions(len(expected.streams) - 1)
    torch.testing.assert_close(torch.tensor(layers[0]["probabilities"]), final.probabilities, atol=2e-5, rtol=0)
    body = {"model": "translator", "clean": CLEAN, "corrupted": CORRUPTED, "answer": "e", "wrong": "q"}
    start, *rows = events(client.post("/regard/patch", json=body))
    metric = logit_difference(byte().encode("e")[0], byte().encode("q")[0])
    both = ((byte().encode_with_special_tokens(text), [7]) for text in (CLEAN, CORRUPTED))
    matrix = activation_patching(translator, *both, metric, "source.stack.*").effects
    matrix = torch.stack([matrix[name] for name in start["names"]])
    torch.testing.assert_close(torch.tensor([row["effects"] for row in rows]), matrix, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("lens", {"text": ""}, "0 tokens"),
        ("lens", {"text": "x" * 97}, "1 to 96"),
        ("lens", {}, "exactly one"),
        ("lens", {"text": "a", "ids": [1]}, "exactly one"),
        ("lens", {"ids": [1], "chat": True}, "chat"),
        ("lens", {"ids": [999]}, "vocabulary"),
        ("lens", {"model": "broken", "ids": [255]}, "vocabulary of 250; send ids"),  # fewer than the tokenizer has
        ("lens", {"model": "translator", "ids": [5] * 2000, "target": []}, "ids has 2000 tokens"),
        ("lens", {"text": "abc", "start": 2, "stop": 2}, "apart"),
        ("lens", {"text": "abc", "target": "x"}, "encoder-decoder"),
        ("lens", {"text": "abc", "top": 0}, "top"),
        ("patch", PROMPTS | {"corrupted": "the lamp"}, "'t' 'h' 'e' ' '"),
        ("patch", {"clean": "x" * 65, "corrupted": "y" * 65}, "1 to 64"),
        ("patch", PROMPTS | {"answer": "ee", "wrong": "q"}, "not one token"),
        ("patch", PROMPTS | {"answer": "e" * 257, "wrong": "q"}, "256"),
        ("patch", PROMPTS | {"answer": "e"}, "go together"),
        ("patch", PROMPTS | {"layer": 1}, "go together"),
        ("patch", PROMPTS | {"answer": "e", "wrong": "q", "layer": 5, "position": 0}, "layers are 0 to 4"),
        ("patch", PROMPTS | {"answer": "e", "wrong": "q", "layer": 0, "position": 12}, "positions are 0 to 11"),
        ("patch", PROMPTS | {"clean": CLEAN, "corrupted": CLEAN}, "after both prompts"),
        ("patch", PROMPTS | {"clean": CLEAN, "corrupted": CLEAN, "answer": "e", "wrong": "q"}, "same for both inputs"),
    ],
)
def test_odd_requests_are_refused_with_a_reason(client, path, body, message):
    response = client.post(f"/regard/{path}", json={"model": "small"} | body)
    assert response.status_code == 400 and message in response.json()["error"]["message"]


def test_models_that_cannot_be_inspected_and_wrong_lengths_are_refused(client, served):
    for method, path, body in (("GET", "spec?model=closed", None), ("POST", "lens", {"model": "closed", "text": "a"})):
        response = client.request(method, f"/regard/{path}", json=body)
        assert response.status_code == 404 and response.json()["error"]["code"] == "no_lens"
    assert client.get("/regard/spec", params={"length": 0}).status_code == 400
    assert client.get("/regard/spec", params={"model": "nobody"}).status_code == 404
    assert served[0].lens_thread.requests == 0  # also after all refused requests


def test_numbers_of_broken_weights_are_null(client):
    first, *layers = events(client.post("/regard/lens", json={"model": "broken", "text": CLEAN, "top": 2}))
    assert set(first["norms"][1]) == {None} and None not in first["norms"][0]
    assert set(layers[0]["entropy"]) == {None} and layers[0]["probabilities"][0] == [None, None]
    body = PROMPTS | {"model": "broken", "answer": "e", "wrong": "q"}
    first, *rows = events(client.post("/regard/patch", json=body))
    assert first["clean"] is None and first["clean_top"][0]["probability"] is None and set(rows[1]["effects"]) == {None}


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, [968, 1000]), ({"start": 0}, [0, 128]), ({"stop": 50}, [18, 50]), ({"start": 990}, [990, 1000]),
     ({"start": 5, "stop": 9}, [5, 9]), ({"start": 5000, "stop": 5001}, [999, 1000])],
)  # fmt: skip
def test_positions_start_where_the_client_asks(given, expected):
    assert positions_of(LensBody(text="a", **given), 1000) == expected


def test_a_client_that_leaves_frees_its_place(client, served, monkeypatch):
    computed = []

    def slow(recorded, tokenizer, layer, positions, top):
        computed.append(layer)
        return {"depth": layer, "padding": "x" * (1 << 20)}  # fills the buffers of the connection

    monkeypatch.setattr("regard.server.inside_routes.layer_predictions", slow)
    with client.stream("POST", "/regard/lens", json={"model": "small", "text": CLEAN}) as response:
        next(response.iter_raw())
    wait_until(lambda: served[0].lens_thread.requests == 0)
    assert len(computed) <= 5
