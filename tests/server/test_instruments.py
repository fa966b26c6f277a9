"""The /regard/instruments routes: the table, panels for controls, and refusals."""

import json
import threading

import httpx
import pytest

from regard.engine.engine import Engine
from regard.instruments import INSTRUMENTS, subject_of
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.server import instrument_routes
from regard.server.app import create_app
from regard.server.lens_thread import Lens
from regard.server.served_model import ServedModel
from regard.text.train import byte
from tests.server.conftest import serve


def test_the_table_lists_every_instrument_in_the_order_of_the_course(start_server) -> None:
    chapters = start_server().client.get("/regard/instruments").json()["chapters"]
    listed = [instrument for chapter in chapters for instrument in chapter["instruments"]]
    assert [instrument["id"] for instrument in listed] == list(INSTRUMENTS)
    assert listed[3] == json.loads(json.dumps(INSTRUMENTS[listed[3]["id"]].describe()))


def test_panels_are_computed_for_the_given_controls(start_server) -> None:
    client = start_server(key="k").client
    answer = client.post("/regard/instruments/masks", json={"controls": {"tokens": 6}}).json()
    assert answer["controls"] == {"kind": "causal", "tokens": 6, "size": 3, "first": 1, "query": 4}
    assert answer["panels"] == INSTRUMENTS["masks"].panels({"tokens": 6})
    assert client.post("/regard/instruments/kv-cache", json={}).status_code == 200  # a fake engine has no decoder
    assert client.post("/regard/instruments/masks", json={}, headers={"authorization": "Bearer x"}).status_code == 401


def test_instruments_that_read_runs_get_the_folder_of_the_server(start_server, tmp_path) -> None:
    (tmp_path / "mine").mkdir()
    phase = {"phase": "only", "tokens": 1, "flops": 1, "seconds": 1}
    (tmp_path / "mine" / "results.json").write_text(json.dumps({"phases": [phase]}))
    found = start_server(every_route=True).client.post("/regard/instruments/phases", json={}).json()["panels"]
    assert found == INSTRUMENTS["phases"].panels({}, runs=tmp_path) and found[1]["labels"] == ["only"]


def test_invalid_controls_are_refused_with_the_rule(start_server) -> None:
    client = start_server().client

    def refusal(id: str, body: dict) -> tuple[int, str]:
        response = client.post(f"/regard/instruments/{id}", json=body)
        return response.status_code, response.json()["error"]["message"]

    assert refusal("mask", {})[0] == 404 and "did you mean 'masks'" in refusal("mask", {})[1]
    status, message = refusal("masks", {"controls": {"tokens": 100}})
    assert status == 400 and message == "tokens=100 must be from 1 to 24"
    assert refusal("masks", {"controls": {"tokens": 2.5}})[1] == "tokens=2.5 must be a whole number"
    assert refusal("masks", {"controls": {"token": 2}})[0] == 400
    assert refusal("masks", {"controls": {str(i): 0 for i in range(100)}})[0] == 400
    assert refusal("masks", {"controls": {"kind": [1]}})[0] == 400
    assert refusal("sharing", {"controls": {"heads": 8, "kv_heads": 3}})[0] == 400
    assert refusal("self-attention", {"controls": {"text": "a " * 20}})[1] == "the text has 20 words; write 1 to 12"
    assert refusal("masks", {"model": "another"})[0] == 404


def test_the_served_decoder_is_the_subject(monkeypatch) -> None:
    tokenizer, threads = byte(), []

    def subject(*args):
        threads.append(threading.current_thread().name)  # it copies the modules, which takes long
        return subject_of(*args)

    monkeypatch.setattr(instrument_routes, "subject_of", subject)
    model = Decoder(tokenizer.vocab_size, 16, (Repeat((Block((Sublayer(Attention(2)),)),), 3),), context=64).build(
        seed=0
    )
    lens = Lens(lambda ids, target: None, (), tokenizer.vocab_size)  # type: ignore[arg-type]
    served = ServedModel("bytes", tokenizer, Engine(model, rows=1), lens=lens)
    with serve(create_app([served])) as port:
        body = {"controls": {"of": "served model", "text": "lamp", "layer": 3}, "model": "bytes"}
        answer = httpx.post(f"http://127.0.0.1:{port}/regard/instruments/heads", json=body, timeout=60).json()
    maps = [panel for panel in answer["panels"] if panel["kind"] == "heatmap"]
    assert maps[0]["rows"] == ["l", "a", "m", "p"] and len(maps) == 1 + 2
    assert {"label": "model", "value": "bytes"} in answer["panels"][-1]["items"]
    assert threads == ["regard-instruments_0"]


@pytest.mark.ledger("fig.5.23", "fig.5.24")
def test_instruments_read_the_cache_and_time_a_request_of_the_served_engine() -> None:
    tokenizer = byte()
    block = Block((Sublayer(Attention(2)),))
    model = Decoder(tokenizer.vocab_size, 16, (Repeat((block,)),), context=64).build(seed=0)
    lens = Lens(lambda ids, target: None, (), tokenizer.vocab_size)  # type: ignore[arg-type]
    engine = Engine(model, rows=2)
    with serve(create_app([ServedModel("bytes", tokenizer, engine, lens=lens)])) as port:

        def panels(id: str, **controls) -> list[dict]:
            url = f"http://127.0.0.1:{port}/regard/instruments/{id}"
            return httpx.post(url, json={"controls": controls}, timeout=60).json()["panels"]

        measured = panels("prefill-decode", of="served model")[1]
        completion = {"model": "bytes", "prompt": "a lamp that lights the room", "max_tokens": 8, "seed": 0}
        for _ in range(2):  # the second finds the first's block of 16 tokens
            assert httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=completion, timeout=60).is_success
        shown = {item["label"]: item["value"] for item in panels("blocks")[-1]["items"]}
    assert measured["title"] == "measured now by the engine: bytes, 8 prompt tokens in one pass"
    assert len(measured["values"]) == 6 and min(measured["values"]) > 0
    assert engine.counts["new_tokens"] == 6 + 2 * 8 and engine.counts["prompt_tokens"] == 8 + 2 * len(
        completion["prompt"]
    )
    assert shown["bytes now: blocks in use"] == f"0 of {engine.store.metrics()['blocks']}"
    assert shown["bytes: prompt tokens found in its cache"] == 16 and shown["bytes now: cached blocks"] > 0
