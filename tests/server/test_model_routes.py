"""Models over HTTP: listed with their sizes, loaded and removed while requests run, planned and verified."""

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from rich.console import Console

from regard.cli import model_library
from regard.cli.model_library import ModelLibrary
from regard.cli.open_engine import EngineOptions
from regard.cli.open_served import NamedModel, open_served
from regard.cli.served_runs import ServedRuns
from regard.server.app import create_app
from regard.server.model_routes import adapter_names
from regard.server.network_options import NetworkOptions
from regard.server.served_model import ServedModel
from tests.server.conftest import serve, wait_until
from tests.server.fake_engine import FakeEngine
from tests.server.server_process import save_tiny

QUIET = Console(quiet=True)
OPTIONS = EngineOptions(device="cpu", rows=2, memory=0.01)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with two models."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("first", "second"):
        save_tiny(folder / "models" / name)
    (folder / "models" / "broken").mkdir()
    (folder / "models" / "broken" / "config.json").write_text('{"model_type": "regard", "spec": {"kind": "nosuch"}}')
    return folder


@pytest.fixture
def connect(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., httpx.Client]]:
    """A server of the first model, started in this directory."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(model_library, "PACKAGED", {})
    opened = []

    def start(*extra: ServedModel, **network) -> httpx.Client:
        named = [NamedModel("first", Path("models/first"))]
        library = ModelLibrary(named, OPTIONS, ServedRuns(Path("runs")), QUIET)
        served = open_served(named, QUIET, OPTIONS)
        app = create_app([*served, *extra], NetworkOptions(**network), library=library)
        opened.append(context := serve(app))
        opened.append(client := httpx.Client(base_url=f"http://127.0.0.1:{context.__enter__()}", timeout=60))
        return client

    yield start
    for each in reversed(opened):
        each.__exit__(None, None, None)


def error(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def load(client: httpx.Client, model: str) -> dict:
    response = client.post("/regard/models/load", json={"model": model})
    assert response.status_code == 200, response.text
    wait_until(lambda: client.get("/regard/models").json()["loading"]["state"] != "running")
    return client.get("/regard/models").json()["loading"]


def names(client: httpx.Client) -> list[str]:
    return [card["id"] for card in client.get("/v1/models").json()["data"]]


def complete(client: httpx.Client, model: str) -> httpx.Response:
    body = {"model": model, "prompt": "Mira", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    return client.post("/v1/completions", json=body)


def test_folders_whose_names_are_not_utf8_are_not_listed(connect, folder, tmp_path):
    odd = os.fsencode(folder) + b"/models/bad\xff"
    shutil.copytree(os.fsencode(folder) + b"/models/first", odd)
    try:
        assert [card["model"] for card in connect().get("/regard/models").json()["available"]].count(
            "models/second"
        ) == 1
    finally:
        shutil.rmtree(odd)
    for name in (b"pirate", b"bad\xff"):
        os.makedirs(os.fsencode(tmp_path) + b"/adapters/" + name + b"/checkpoints")
    assert adapter_names(tmp_path / "adapters") == ["pirate"]
    assert adapter_names(tmp_path / "removed") == []


def test_a_model_is_loaded_used_and_removed(connect, folder):
    client = connect()
    listed = client.get("/regard/models").json()
    (first,) = listed["served"]
    assert (first["model"], first["does"], first["dtype"], first["device"]) == ("first", "chat", "float32", "cpu")
    assert first["bytes"] >= 4 * first["parameters"] > 0 and first["cache_bytes"] > 0 and first["context"] == 1024
    stored = {each["model"]: each for each in listed["available"]}
    assert set(stored) == {"models/first", "models/second", "models/broken"}
    assert stored["models/first"]["served_as"] == "first" and stored["models/second"]["served_as"] is None
    assert stored["models/second"]["parameters"] == first["parameters"]
    assert "nosuch" in stored["models/broken"]["problem"] and str(folder) not in stored["models/broken"]["problem"]

    loaded = load(client, "models/second")
    assert (loaded["state"], loaded["name"], loaded["error"]) == ("done", "second", None)
    assert names(client) == ["first", "second"]
    texts = [complete(client, name).json()["choices"][0]["text"] for name in ("first", "second")]
    assert texts[0] == texts[1]
    assert client.get("/regard/models").json()["available"][2]["served_as"] == "second"
    assert load(client, "models/second")["name"] == "second-2"  # a name of its own

    for name in ("first", "second-2"):  # also the one that the server was started with
        assert client.post("/regard/models/unload", json={"model": name}).json() == {"status": "ok"}
        assert error(complete(client, name)) == (404, "model_not_found")
    assert complete(client, "second").is_success and client.get("/health").is_success
    assert error(client.post("/regard/models/unload", json={"model": "second"})) == (409, "last_model")
    assert error(client.post("/regard/models/unload", json={"model": "first"})) == (404, "model_not_found")


def load_state(client: httpx.Client) -> dict:
    return client.get("/regard/models").json()["loading"]


def test_requests_of_a_removed_model_finish(connect, tokenizer):
    engine = FakeEngine(tokenizer, " The lamp is in the garden")
    client = connect(ServedModel("slow", tokenizer, engine))
    engine.may_step.clear()
    with ThreadPoolExecutor(3) as pool:
        running = pool.submit(client.post, "/v1/completions", json={"model": "slow", "prompt": "Mira"})
        wait_until(lambda: len(engine.active) == 1)
        removal = pool.submit(client.post, "/regard/models/unload", json={"model": "slow"})
        wait_until(lambda: "slow" not in names(client))
        assert not removal.done() and error(complete(client, "slow")) == (404, "model_not_found")
        engine.may_step.set()
        assert running.result().json()["choices"][0]["text"] == " The lamp is in the garden"
        assert removal.result().json() == {"status": "ok"}


def test_one_model_is_loaded_at_a_time_and_failures_are_told(connect, monkeypatch):
    client, may_load, opened = connect(), threading.Event(), model_library.open_served
    with monkeypatch.context() as patch, ThreadPoolExecutor(4) as pool:
        patch.setattr(model_library, "open_served", lambda *args: may_load.wait(60) and opened(*args))
        request = {"json": {"model": "models/second"}}
        answers = list(pool.map(lambda _: client.post("/regard/models/load", **request).status_code, range(4)))
        may_load.set()
    assert sorted(answers) == [200, 409, 409, 409]
    wait_until(lambda: load_state(client)["state"] == "done")
    failed = load(client, "models/broken")
    assert failed["state"] == "failed" and "nosuch" in failed["error"]
    monkeypatch.setattr(model_library, "free_memory", lambda device: 1000)
    failed = load(client, "models/second")
    assert failed["state"] == "failed" and "are free; unload a model first" in failed["error"]

    def no_memory(*_: object) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr(model_library, "free_memory", lambda device: None)
    monkeypatch.setattr(model_library, "open_served", no_memory)
    assert "there is not enough memory" in load(client, "models/second")["error"]
    assert names(client) == ["first", "second"] and complete(client, "first").is_success


@pytest.mark.parametrize("route", ["load", "plan", "verify", "unload"])
def test_only_listed_models_are_opened(connect, folder, route):
    client = connect()
    for name in ("..", "/etc/passwd", "models/../models/second", str(folder / "models" / "second"), "a\0b", "x" * 500):
        response = client.post(f"/regard/models/{route}", json={"model": name})
        if route == "verify":
            wait_until(lambda: client.get("/regard/models/verify").json()["work"]["state"] != "running")
            state = client.get("/regard/models/verify").json()["work"]
            assert state["state"] == "failed" and "there is no model" in state["error"]
        else:
            assert error(response) == (404, "model_not_found")
    assert error(client.post(f"/regard/models/{route}", json={})) == (400, "invalid_value")


def test_plan_has_the_numbers_of_the_command(connect):
    client = connect()
    body = {"model": "llama-3.1-8b", "dtype": "bfloat16", "context": 4096, "batch": 2, "device": "h100"}
    table = client.post("/regard/models/plan", json=body).json()
    rows = {(group, quantity): number for group, quantity, number in table["rows"]}
    assert rows["parameters", "total"] == "8.03 G (100.0%)" and "batch 2" in table["conditions"]
    assert ("on h100", "decode tokens per second") in rows
    own = client.post("/regard/models/plan", json={"model": "models/first"}).json()
    assert own["conditions"].startswith("context 1,024")
    for wrong in ({"dtype": "nosuch"}, {"device": "nosuch"}, {"batch": 0}, {"context": -1}, {"weights": "x" * 300}):
        assert error(client.post("/regard/models/plan", json=body | wrong)) == (400, "invalid_value")
    for size in ("9" * 40 + "T", "99999999999999B", "9" * 40 + "M", "10.1T"):
        assert error(client.post("/regard/models/plan", json=body | {"model": size})) == (400, "invalid_value")


def test_models_of_the_same_name_have_longer_names(tmp_path, monkeypatch):
    for place in ("here", "other"):
        (tmp_path / place / "runs" / "demo" / "checkpoints").mkdir(parents=True)
        (tmp_path / place / "runs" / "demo" / "config.json").write_text("{}")
        (tmp_path / place / "models" / "small").mkdir(parents=True)
        (tmp_path / place / "models" / "small" / "config.json").write_text('{"model_type": "regard"}')
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(model_library, "PACKAGED", {})
    given = [NamedModel("models/small", tmp_path / "other" / "models" / "small")]
    library = ModelLibrary(given, OPTIONS, ServedRuns(tmp_path / "other" / "runs"), QUIET)
    assert {name: entry.path.resolve().relative_to(tmp_path) for name, entry in library.stored().items()} == {
        "runs/demo": Path("other/runs/demo"),
        "here/runs/demo": Path("here/runs/demo"),
        "models/small": Path("here/models/small"),
        "other/models/small": Path("other/models/small"),
    }


def test_verify_reports_progress_and_every_law(connect):
    client = connect()
    state = client.get("/regard/models/verify").json()
    assert state == {"work": None, "table": None}
    assert client.post("/regard/models/verify", json={"model": "models/second"}).is_success
    assert error(client.post("/regard/models/verify", json={"model": "models/first"})) == (409, "busy")
    wait_until(lambda: client.get("/regard/models/verify").json()["work"]["done"] > 3, seconds=60)
    assert client.post("/regard/models/verify/stop").is_success
    wait_until(lambda: client.get("/regard/models/verify").json()["work"]["state"] == "failed", seconds=60)
    assert client.get("/regard/models/verify").json()["work"]["error"] == "it was stopped"


def test_a_model_that_is_not_installed_or_too_large_is_not_verified(connect, monkeypatch):
    client = connect()
    missing = SimpleNamespace(path=None, description="a model", install_command="pip install missing")
    monkeypatch.setattr(model_library, "PACKAGED", {"missing": missing})
    parameters = client.get("/regard/models").json()["served"][0]["parameters"]
    monkeypatch.setattr(model_library, "free_memory", lambda device: 8 * parameters - 1)  # enough for float32
    for model, message in [
        ("missing", "missing is not installed; install it with: pip install missing"),
        ("models/second", "are free; unload a model first"),
    ]:
        assert client.post("/regard/models/verify", json={"model": model}).is_success
        wait_until(lambda: client.get("/regard/models/verify").json()["work"]["state"] == "failed")
        assert message in client.get("/regard/models/verify").json()["work"]["error"]


def test_the_problem_of_a_model_does_not_name_its_folder(connect, folder, monkeypatch):
    def unreadable(weights: Path) -> None:
        raise ValueError(f"{weights.resolve()}/model.safetensors cannot be read")

    client = connect()
    monkeypatch.setattr(ModelLibrary, "size", lambda self, weights: unreadable(weights))
    problems = [entry["problem"] for entry in client.get("/regard/models").json()["available"]]
    assert problems == ["model.safetensors cannot be read"] * 3


@pytest.mark.slow
def test_verify_finishes_with_its_table(connect):
    client = connect()
    assert client.post("/regard/models/verify", json={"model": "models/second"}).is_success
    wait_until(lambda: client.get("/regard/models/verify").json()["work"]["state"] == "done", seconds=240)
    state = client.get("/regard/models/verify").json()
    assert state["work"]["done"] == state["work"]["total"] > 20
    results = {law: result for law, result, *_ in state["table"]["rows"]}
    assert state["table"]["ok"] and results["cached = whole"] == "pass"


@pytest.mark.parametrize("network", [{"allow_origins": ("https://a.example",)}, {"allow_hosts": ("a.example",)}])
def test_without_a_key_other_hosts_cannot_load_anything(connect, network):
    client = connect(**network)
    assert client.get("/regard/models").json()["may_load"] is False
    for route in ("load", "unload", "verify"):
        response = client.post(f"/regard/models/{route}", json={"model": "models/second"})
        assert error(response) == (403, "key_required")
    assert error(client.post("/regard/models/verify/stop")) == (403, "key_required")
