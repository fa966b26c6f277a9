"""The attention routes: thumbnails of all heads, parts of a map, labels of heads, as binary arrays by token ids."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from regard.lens.detectors import HeadScores
from regard.lens.maps import row_entropy
from regard.server import map_parts
from regard.server.attention_routes import labels_of, sequences_of
from regard.server.attention_schema import SequenceBody
from regard.server.binary_arrays import decode_arrays, encode_arrays
from regard.server.errors import ApiError
from regard.server.map_parts import MapShape, head_part, layer_thumbnails
from tests.server.fake_engine import HEADS, FakeRecording

IDS = [5 + (7 * i) % 200 for i in range(60)]


def post(client, path: str, **body):
    response = client.post(f"/regard/attention/{path}", json={"ids": IDS} | body)
    assert response.status_code == 200 and response.headers["content-type"] == "application/octet-stream"
    return decode_arrays(response.content)


def test_arrays_survive_encoding():
    arrays = {"a": torch.arange(5, dtype=torch.uint8), "b": torch.randn(2, 3), "c": torch.zeros(0, 4)}
    header, found = decode_arrays(encode_arrays({"text": "lämp"}, arrays))
    assert header["text"] == "lämp" and list(found) == ["a", "b", "c"]
    assert all(torch.equal(found[name], arrays[name]) for name in arrays)


def test_a_head_equals_its_recorded_weights(start_server):
    _, part = post(start_server().client, "head", layer=1, head=2)
    expected = FakeRecording(IDS).weights(1)[2]
    assert torch.equal(part["weights"], expected) and part["first"].tolist() == expected[:, 0].tolist()
    torch.testing.assert_close(part["entropy"], row_entropy(expected))
    assert torch.equal(part["peak"], expected[:, 1:].amax(1))


def test_ranges_and_pooling_of_a_head(start_server):
    client = start_server().client
    expected = FakeRecording(IDS).weights(0)[1]
    _, part = post(client, "head", layer=0, head=1, rows=[10, 20], columns=[5, 9])
    assert torch.equal(part["weights"], expected[10:20, 5:9]) and len(part["peak"]) == 10
    _, part = post(client, "head", layer=0, head=1, pool=7)
    assert part["weights"].shape == (9, 9) and part["entropy"].shape == (60,)
    assert part["weights"][3, 2] == expected[21:28, 14:21].max() and part["weights"][8, 8] == expected[56:, 56:].max()
    assert part["second"][3] == expected[21:28, 1:7].max()


def test_chunks_of_rows_give_the_same_part(monkeypatch):
    recording, shape = FakeRecording(IDS), MapShape(4, 60, 60, False)
    whole = head_part(recording, 0, shape, 3, range(60), range(60), 4)
    thumbnails = layer_thumbnails(recording, 0, shape)
    monkeypatch.setattr(map_parts, "CHUNK", 300)
    for found, expected in zip(head_part(recording, 0, shape, 3, range(60), range(60), 4), whole, strict=True):
        assert torch.equal(found, expected)
    for found, expected in zip(layer_thumbnails(recording, 0, shape), thumbnails, strict=True):
        torch.testing.assert_close(found, expected)


def test_an_implied_matrix_is_computed_once(monkeypatch):
    computed = []

    class Counted(FakeRecording):
        def weights(self, layer, heads=slice(None), rows=slice(None)):
            computed.extend(range(4)[heads])
            return super().weights(layer, heads, rows)

    recording, shape = Counted(IDS), MapShape(4, 60, 60, True)
    whole, part = layer_thumbnails(recording, 0, shape), head_part(recording, 0, shape, 3, range(60), range(60), 4)
    computed.clear()
    monkeypatch.setattr(map_parts, "CHUNK", 300)  # less than one map
    found = layer_thumbnails(recording, 0, shape)
    assert computed == [0, 1, 2, 3] and all(map(torch.equal, found, whole))
    assert all(map(torch.equal, head_part(recording, 0, shape, 3, range(60), range(60), 4), part))
    assert computed == [0, 1, 2, 3, 3]


def test_the_overview_has_thumbnails_of_all_heads(start_server):
    client = start_server().client
    header, found = post(client, "overview")
    assert [layer["layer"] for layer in header["layers"]] == [0, 1, 3]
    assert {(layer["heads"], layer["rows"], layer["columns"]) for layer in header["layers"]} == {(4, 24, 24)}
    assert len(found["scale"]) == len(found["entropy"]) == sum(HEADS)
    expected = torch.cat([FakeRecording(IDS).weights(layer) for layer in (0, 1, 3)])
    torch.testing.assert_close(found["scale"], expected.amax((1, 2)))
    torch.testing.assert_close(found["entropy"], row_entropy(expected).mean(1))
    pixels = found["pixels"].view(12, 24, 24).float() / 255
    weights = pixels**2 * found["scale"][:, None, None]
    assert (weights[:, 0, 0] - expected[:, :3, :3].amax((1, 2))).abs().max() < 0.01
    assert (weights[:, 23, 0] - expected[:, 57:, :3].amax((1, 2))).abs().max() < 0.01
    second = (found["second"].view(12, 24).float() / 255) ** 2 * found["scale"][:, None]
    assert (second[:, 23] - expected[:, 57:, 1:3].amax((1, 2))).abs().max() < 0.01
    header, found = post(client, "overview", layers=[1, 3])
    assert [layer["layer"] for layer in header["layers"]] == [1] and len(found["scale"]) == 4
    assert post(client, "overview", layers=[2, 3])[0] == {"layers": [], "arrays": []}


def test_an_implied_matrix_keeps_its_signs():
    class Signed(FakeRecording):
        def weights(self, *part):
            return super().weights(*part) * torch.tensor([1.0, -1.0, 1.0, -2.0])[part[1], None, None]

    thumbnails = layer_thumbnails(Signed(IDS), 0, MapShape(4, 60, 60, True))
    assert (thumbnails.pixels[[0, 2]] >= 128).all() and (thumbnails.pixels[[1, 3]] <= 128).all()
    part = head_part(Signed(IDS), 0, MapShape(4, 60, 60, True), 1, range(60), range(60), 5)
    assert (part.weights <= 0).all() and part.weights.min() < -0.5 and (part.peak >= 0).all()
    assert 0 < part.entropy[-1] < math.log(60)


@pytest.mark.parametrize(
    ("path", "change", "message"),
    [
        ("head", {"layer": 4, "head": 0}, "layers are 0 to 3"),
        ("head", {"layer": 2, "head": 0}, "no attention map"),
        ("head", {"layer": 0, "head": 4}, "has 4 heads"),
        ("head", {"layer": 0, "head": 0, "rows": [5, 61]}, "rows=[5, 61]"),
        ("head", {"layer": 0, "head": 0, "columns": [5, 5]}, "columns=[5, 5]"),
        ("head", {"layer": 0, "head": 0, "rows": [5, 10], "pool": 2}, "multiple"),
        ("overview", {"layers": [0, 5]}, "layers=[0, 5]"),
        ("overview", {"ids": [340]}, "vocabulary of 340"),
        ("overview", {"ids": [5] * 4097}, "4096"),
        ("overview", {"ids": []}, "ids"),
        ("head", {"ids": [5] * 2049, "layer": 0, "head": 0}, "at most 4194304"),
        ("overview", {"target": [5]}, "encoder-decoder"),
    ],
)
def test_wrong_layers_heads_ranges_and_ids_are_refused(start_server, path, change, message):
    response = start_server().client.post(f"/regard/attention/{path}", json={"ids": IDS} | change)
    assert response.status_code == 400 and message in response.json()["error"]["message"]


def test_the_labels_of_heads_are_computed_once(start_server):
    server = start_server()
    labels = server.client.get("/regard/heads").json()
    assert labels["scores"]["previous token"][0][0] == 0.8 and labels["scores"]["induction"][2] is None
    task = server.served.lens._scores
    assert server.client.get("/regard/heads").json() == labels and server.served.lens._scores is task
    assert start_server(lens=None).client.get("/regard/heads").status_code == 404


def test_layers_are_described(start_server):
    facts = start_server().client.get("/regard/model").json()
    first, _, third, _ = facts["attention_layers"]
    assert first["mixers"][0]["name"] == "attention" and first["mixers"][0]["causal"] and facts["head_labels"]
    assert third["mixers"][0]["heads"] == 0 and third["mixers"][0]["reason"] == "it has no softmax"


def test_the_source_of_an_encoder_decoder_has_its_own_limit():
    served: Any = SimpleNamespace(capacity=5, prompt_capacity=100)
    lens: Any = SimpleNamespace(lens=SimpleNamespace(start=(1,), vocab=9, target_vocab=4))
    assert sequences_of(served, lens, SequenceBody(ids=[2] * 100, target=[3] * 4)) == ((2,) * 100, (1, 3, 3, 3, 3))
    for name, body in {"ids": {"ids": [2] * 101}, "target": {"ids": [2], "target": [3] * 5}}.items():
        with pytest.raises(ApiError, match=f"{name} has"):
            sequences_of(served, lens, SequenceBody(**body))
    for vocab, body in {9: {"ids": [9]}, 4: {"ids": [8], "target": [4]}}.items():
        with pytest.raises(ApiError, match=f"outside the vocabulary of {vocab}"):
            sequences_of(served, lens, SequenceBody(**body))


def test_scores_that_are_no_numbers_are_null():
    scores = {"induction": [torch.tensor([0.25, math.nan]), None, torch.tensor([math.inf, 0.12345])]}
    found = labels_of(HeadScores(scores, {"induction": 0.1}))
    assert found.scores == {"induction": [[0.25, None], None, [None, 0.1235]]}
