"""The runs of a folder over HTTP: list, metrics from a cursor on, samples, and the demo as a process of its own."""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from regard.cli import demo_process
from regard.cli.served_runs import ServedRuns, exact_match
from regard.server import run_routes
from regard.server.app import create_app
from regard.server.network_options import NetworkOptions
from regard.server.served_model import ServedModel
from regard.training.run_metrics import read_metrics, read_samples
from tests.server.conftest import REPLY, serve, wait_until
from tests.server.fake_engine import FakeEngine

SAMPLES = "step 200\n    Mira is in\n      the garden\n\nstep 400\n    step 7\n\n"


def write_run(folder: Path, steps: int = 40, of: int = 100, source: str = "world") -> Path:
    """A run that was stopped, as training leaves it."""
    (folder / "checkpoints").mkdir(parents=True)
    config = {"kind": "recipe", "train": {"steps": of}, "data": {"source": source}, "model": {"kind": "decoder"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "samples.txt").write_text(SAMPLES)
    append(folder, range(1, steps + 1))
    return folder


def append(folder: Path, steps: range, scale: float = 1.0) -> None:
    with (folder / "metrics.jsonl").open("a") as stream:
        for step in steps:
            record = {"step": step, "loss": scale * 8 / step, "grad_norm": 1.0, "tokens": 100 * step, "lr": 0.001}
            stream.write(json.dumps(record) + "\n")
            if step % 20 == 0:
                stream.write(json.dumps({"step": step, "held_out_loss": scale * 9 / step}) + "\n")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def connect(folder, tokenizer) -> Iterator[Callable[..., httpx.Client]]:
    clients, servers = [], []

    def start(**network) -> httpx.Client:
        model = ServedModel("tiny", tokenizer, FakeEngine(tokenizer, REPLY))
        app = create_app([model], NetworkOptions(**network), runs=ServedRuns(folder))
        servers.append(context := serve(app))
        url = f"http://127.0.0.1:{context.__enter__()}"
        clients.append(httpx.Client(base_url=url, timeout=60))
        return clients[-1]

    yield start
    for client in clients:
        client.close()
    for server in servers:
        server.__exit__(None, None, None)


def metrics(client: httpx.Client, run: str, cursor: str | None = None, **options) -> dict:
    response = client.post("/regard/runs/metrics", json={"runs": [{"run": run, "cursor": cursor}]} | options)
    assert response.status_code == 200, response.text
    return response.json()["runs"][run]


def error(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def test_runs_are_listed_and_new_lines_are_read_from_the_cursor_on(connect, folder):
    run = write_run(folder / "first")
    write_run(folder / "sweep" / "trial-1", steps=3)
    client = connect()
    listed = client.get("/regard/runs").json()
    assert [each["run"] for each in listed["runs"]] == ["first", "sweep/trial-1"]
    first = listed["runs"][0]
    assert (first["state"], first["step"], first["steps"], first["held_out_loss"]) == ("stopped", 40, 100, 9 / 40)
    assert listed["may_start"] and listed["process"] is None and not first["can_stop"]

    found = metrics(client, "first")
    assert found["restarted"] and found["curves"]["loss"]["steps"] == list(range(1, 41))
    assert found["curves"]["held_out_loss"] == {"steps": [20, 40], "values": [0.45, 0.225], "low": None, "high": None}
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 41, "loss": 0.2}\n{"step": 42, "lo')  # a line that is being written
    new = metrics(client, "first", found["cursor"])
    assert not new["restarted"] and new["curves"] == {
        "loss": {"steps": [41], "values": [0.2], "low": None, "high": None}
    }
    assert metrics(client, "first", new["cursor"])["curves"] == {}
    assert set(metrics(client, "first", columns=["lr", "nosuch"])["curves"]) == {"lr"}
    assert client.get("/regard/runs").json()["runs"][0]["step"] == 41  # the list is read again


def test_a_resumed_run_replaces_the_lines_after_its_checkpoint(folder):
    run = write_run(folder / "first")
    cursor = read_metrics(run / "metrics.jsonl").cursor
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:21]))
    assert read_metrics(run / "metrics.jsonl", cursor).restarted  # the file is shorter
    append(run, range(21, 80), scale=2.0)
    again = read_metrics(run / "metrics.jsonl", cursor)
    assert again.restarted and again.curves["loss"].steps == list(range(1, 80))


@pytest.mark.parametrize("cursor", ["", "-", "x", "5-1", "1e9-1", "99999999999999999-4", "-1-2", "²-²", "0-0"])
def test_a_cursor_that_is_none_reads_everything(folder, cursor):
    run = write_run(folder / "first", steps=5)
    found = read_metrics(run / "metrics.jsonl", cursor)
    assert found.restarted and found.curves["loss"].steps == [1, 2, 3, 4, 5]


def test_long_curves_keep_minimum_and_maximum_of_every_bucket(folder):
    run = write_run(folder / "long", steps=5000)
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 5001, "loss": 1e308}\n{"step": 5002, "loss": 1e308}\n')
        stream.write('{"step": 5003, "loss": NaN}\nnot json\n{"loss": 3}\n')
    curve = read_metrics(run / "metrics.jsonl", max_points=100).curves["loss"]
    assert len(curve.steps) == len(curve.values) == 100 and curve.steps[-1] == 5002
    assert curve.low is not None and curve.high is not None
    assert curve.high[0] == 8.0 and curve.high[-1] == 1e308 and min(curve.low) == pytest.approx(8 / 5000, 1e-5)
    assert all(low <= value <= high for low, value, high in zip(curve.low, curve.values, curve.high, strict=True))


def test_samples(connect, folder):
    run = write_run(folder / "first")
    client = connect()
    expected = [{"step": 200, "text": "Mira is in\n  the garden"}, {"step": 400, "text": "step 7"}]
    assert client.get("/regard/runs/samples", params={"run": "first"}).json() == {"samples": expected}
    (run / "samples.txt").write_text("".join(f"step {step}\n    text {step}\n\n" for step in range(1, 1001)))
    many = read_samples(run / "samples.txt", max_samples=10)
    assert many[-1] == (1000, "text 1000") and len(many) == 10


NAMES = [
    "..",
    ".",
    "",
    "../secret",
    "/etc",
    "link",
    "nosuch",
    "a\0b",
    "x" * 500,
    "first/../../secret",
    "first/checkpoints",
]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: repr(name)[:20])
def test_names_stay_in_the_folder(connect, folder, name):
    write_run(folder / "first")
    (folder / "link").symlink_to(write_run(folder.parent / "secret"))
    linked = write_run(folder / "linked")
    (linked / "metrics.jsonl").unlink()
    (linked / "metrics.jsonl").symlink_to(folder.parent / "secret" / "metrics.jsonl")
    client = connect()
    assert [run["run"] for run in client.get("/regard/runs").json()["runs"]] == ["first"]
    for response in (
        client.post("/regard/runs/metrics", json={"runs": [{"run": name}]}),
        client.post("/regard/runs/metrics", json={"runs": [{"run": "linked"}]}),
        client.get("/regard/runs/samples", params={"run": name}),
        client.post("/regard/runs/stop", json={"run": name[:64]}),
    ):
        assert response.status_code in (400, 404), response.text
        assert str(folder.parent) not in response.text
    if name not in ("nosuch", "x" * 500):
        response = client.post("/regard/runs/start", json={"run": name})
        assert response.status_code in (400, 409), response.text


def test_bad_requests_are_refused(connect):
    client, one = connect(), {"runs": [{"run": "a"}]}
    bodies = [{}, {"runs": []}, {"runs": one["runs"] * 17}, {"runs": "a"}, one | {"points": 1}, {"runs": [{"run": 3}]}]
    bodies += [{"runs": [{"run": "a", "cursor": "x" * 65}]}, one | {"columns": ["x"] * 65}]
    for body in bodies:
        assert error(client.post("/regard/runs/metrics", json=body)) == (400, "invalid_value")


def test_a_damaged_run_and_a_missing_folder_are_no_failure(connect, folder):
    client = connect()
    assert client.get("/regard/runs").json()["runs"] == []
    (folder / "broken").mkdir(parents=True)
    (folder / "broken" / "metrics.jsonl").write_bytes(b"\xff\xfe{\n\n")
    run = client.get("/regard/runs").json()["runs"][0]
    assert run["state"] == "damaged" and run["problems"]
    assert metrics(client, "broken")["curves"] == {}


def test_odd_names_and_numbers_do_not_hide_the_other_runs(connect, folder):
    """A folder whose name is not UTF-8, integers beyond every float, and unpaired surrogates in a recipe."""
    os.makedirs(os.fsencode(folder) + b"/bad\xff/checkpoints")
    for name in ("huge", "good"):
        write_run(folder / name, steps=2)
    with (folder / "huge" / "metrics.jsonl").open("a") as file:
        file.write(f'{{"step": 3, "loss": {"9" * 400}, "lr": 0.5}}\n{{"step": {"9" * 400}, "loss": 1}}\n')
    (folder / "odd").mkdir()
    (folder / "odd" / "config.json").write_text('{"train": {}, "model": "\\ud800", "data": "\\ud800"}')
    client = connect()
    assert sorted(run["run"] for run in client.get("/regard/runs").json()["runs"]) == ["good", "huge", "odd"]
    curves = metrics(client, "huge")["curves"]
    assert curves["lr"]["steps"][-1] == 3 and curves["loss"]["steps"][-1] == 2


@pytest.mark.parametrize("network", [{"allow_origins": ("https://a.example",)}, {"allow_hosts": ("a.example",)}])
def test_without_a_key_other_hosts_cannot_start_anything(connect, network):
    client = connect(**network)
    assert client.get("/regard/runs").json()["may_start"] is False
    assert error(client.post("/regard/runs/start", json={})) == (403, "key_required")
    assert error(client.post("/regard/runs/stop", json={"run": "demo"})) == (403, "key_required")


@pytest.fixture
def slow_demo(started_demos, monkeypatch) -> None:
    """A program in the place of `regard demo` that sleeps until a signal."""
    monkeypatch.setattr(demo_process, "COMMAND", ["sh", "-c", "echo starting; exec sleep 300"])


def test_the_demo_is_one_process_that_survives_the_server(connect, folder, slow_demo):
    client = connect()
    with ThreadPoolExecutor(4) as pool:  # several clients at the same time
        answers = list(pool.map(lambda _: client.post("/regard/runs/start", json={}), range(4)))
    assert sorted(answer.status_code for answer in answers) == [200, 409, 409, 409]
    process = client.get("/regard/runs").json()["process"]
    assert (process["run"], process["stage"]) == ("demo", "starting")
    assert error(client.post("/regard/runs/start", json={"run": "other"})) == (409, "run_conflict")

    other = connect()  # a server that did not start it
    assert other.get("/regard/runs").json()["process"]["stage"] == "starting"
    wait_until(lambda: demo_process.last_lines(folder / "demo") == ["starting"])
    assert other.post("/regard/runs/stop", json={"run": "demo"}).json() == {"status": "ok"}
    wait_until(lambda: client.get("/regard/runs").json()["process"]["stage"] == "failed")  # it took no step
    assert client.get("/regard/runs").json()["process"]["output"] == ["starting"]
    assert error(other.post("/regard/runs/stop", json={"run": "demo"})) == (404, "run_not_found")
    assert client.post("/regard/runs/start", json={}).is_success  # again
    assert client.post("/regard/runs/stop", json={"run": "demo"}).is_success


def test_the_id_of_an_earlier_process_is_not_used(folder, slow_demo, monkeypatch):
    processes, run = demo_process.DemoProcesses(), folder / "demo"
    monkeypatch.setattr(demo_process, "COMMAND", ["sh", "-c", "trap '' TERM; echo starting; exec sleep 300"])
    processes.start(run)
    wait_until(lambda: demo_process.last_lines(run) == ["starting"])  # from here on it ignores the signal
    assert processes.stop(run) and processes.is_stopping(run)
    os.kill(processes.children[0].pid, signal.SIGKILL)
    wait_until(lambda: processes.pid(run) is None and not processes.children)
    assert not processes.signalled  # its id may be that of a later process
    monkeypatch.setattr(demo_process, "COMMAND", ["./nosuch-program"])
    with pytest.raises(FileNotFoundError):
        processes.start(run)
    assert not (run / "process.json").exists()


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1" + "0" * 400, "null", '"0.9"', "[]"])
def test_a_score_that_is_no_number_is_left_out(folder, value):
    run = write_run(folder / "demo", steps=1)
    (run / "summary.json").write_text(f'{{"exact_match": {value}}}')
    assert exact_match(run) is None


def test_large_bodies_are_made_beside_the_event_loop(connect, folder, monkeypatch):
    write_run(folder / "first", steps=5)
    threads, make = [], run_routes.metrics_json
    monkeypatch.setattr(
        run_routes, "metrics_json", lambda found: threads.append(threading.current_thread().name) or make(found)
    )
    assert metrics(connect(), "first")["curves"]["loss"]["steps"] == [1, 2, 3, 4, 5]
    assert threads == ["regard-runs_0"]


def test_only_demos_that_are_not_finished_are_started(connect, folder):
    write_run(folder / "mine", source="text")
    (write_run(folder / "demo") / "summary.json").write_text('{"exact_match": 0.9}')
    client = connect()
    assert client.get("/regard/runs").json()["runs"][0]["exact_match"] == 0.9
    for name in ("mine", "demo", "a b", "-x", "a/b"):
        assert error(client.post("/regard/runs/start", json={"run": name})) == (409, "run_conflict")


@pytest.mark.slow
def test_a_demo_is_trained_stopped_and_continued(connect, folder, started_demos):
    client = connect()

    def run() -> dict:
        return next(iter(client.get("/regard/runs").json()["runs"]), {"stage": None, "step": 0})

    assert client.post("/regard/runs/start", json={"steps": 60}).is_success
    wait_until(lambda: run()["step"] > 5, seconds=120)
    assert run()["stage"] == "running" and run()["can_stop"]
    assert client.post("/regard/runs/stop", json={"run": "demo"}).is_success
    wait_until(lambda: run()["stage"] == "stopped", seconds=60)
    step = run()["step"]
    assert client.post("/regard/runs/start", json={"run": "demo"}).is_success
    wait_until(lambda: run()["exact_match"] is not None and not run()["can_stop"], seconds=240)
    assert run()["state"] == "finished" and run()["step"] == 60 and step < 60
    records = map(json.loads, (folder / "demo" / "metrics.jsonl").read_text().splitlines())
    assert [record["step"] for record in records if "lr" in record] == [*range(1, 61)]
