"""`regard batch`: OpenAI's batch format in and out, refused requests, and a run that is killed and continued."""

import fcntl
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from regard.load_model import load
from tests.cli.conftest import regard
from tests.cli.test_open_encoder import save_encoder

GREEDY = {"max_tokens": 4, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "Where is Anna?"}], **GREEDY}


def line(custom_id: object, body: object = CHAT, url: str = "/v1/chat/completions", method: str = "POST") -> dict:
    return {"custom_id": custom_id, "method": method, "url": url, "body": body}


def write(path: Path, lines: list[dict]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    return path


def read(path: Path) -> dict[str, dict]:
    results = [json.loads(text) for text in path.read_text().splitlines()]
    assert len({result["custom_id"] for result in results}) == len(results), "a custom_id occurs twice"
    return {result["custom_id"]: result for result in results}


def test_every_request_gets_its_response(demo_run: Path, tmp_path: Path) -> None:
    completion = {"model": "demo", "prompt": "Anna is in", **GREEDY}
    requests = [
        line("chat"),
        line("completion", completion, "/v1/completions"),
        line("sampled", completion | {"temperature": 1, "seed": 4, "n": 3}, "/v1/completions"),
        line("no prompt", {}, "/v1/completions"),
        line("other model", CHAT | {"model": "gpt"}),
        line("too long", CHAT | {"messages": [{"role": "user", "content": "Anna " * 5000}]}),
        line("stream", CHAT | {"stream": True}),
        line("get", method="GET"),
        line("route", url="/metrics"),
        line("body", body=[1]),
        line("NaN", CHAT | {"temperature": float("nan")}),
        line("surrogate", {"prompt": "\ud800", **GREEDY}, "/v1/completions"),
    ]
    out = tmp_path / "out.jsonl"
    result = regard("batch", demo_run, write(tmp_path / "in.jsonl", requests), out, "--rows", 2)
    assert result.exit_code == 1, result.output
    assert "9 of 12 requests failed (custom_id '" in result.stderr and f"the reasons are in {out}; to" in result.stderr
    found = read(out)
    assert found.keys() == {request["custom_id"] for request in requests}
    statuses = {name: entry["response"]["status_code"] for name, entry in found.items()}
    assert statuses == {
        "chat": 200, "completion": 200, "sampled": 200, "no prompt": 400, "other model": 404, "too long": 400,
        "stream": 400, "get": 400, "route": 400, "body": 400, "NaN": 400, "surrogate": 400,
    }  # fmt: skip
    for entry in found.values():
        assert entry["id"].startswith("batch_req_") and entry["error"] is None
        assert ("error" in entry["response"]["body"]) == (entry["response"]["status_code"] != 200)
    printed = regard("generate", demo_run, "--prompt", "Anna is in", "--max-new", 4, "--temperature", 0, "--json")
    text = json.loads(printed.stdout)["text"]
    assert found["completion"]["response"]["body"]["choices"][0]["text"] == text
    assert len(found["sampled"]["response"]["body"]["choices"]) == 3
    assert "/v1/embeddings" in found["route"]["response"]["body"]["error"]["message"]
    before = out.read_bytes()
    again = regard("batch", demo_run, tmp_path / "in.jsonl", out)
    assert again.exit_code == 1 and "9 of 12 requests failed" in again.stderr and out.read_bytes() == before
    corrected = [line("body") if request["custom_id"] == "body" else request for request in requests]
    kept = [entry for entry in found.values() if entry["custom_id"] != "body"]
    again = regard("batch", demo_run, write(tmp_path / "in.jsonl", corrected), write(out, kept), "--rows", 2)
    assert again.exit_code == 1 and "8 of 12 requests failed" in again.stderr and "has 11 of 12" in again.stderr
    assert read(out)["body"]["response"]["status_code"] == 200


def test_embeddings_of_an_encoder(tmp_path: Path) -> None:
    folder = save_encoder(tmp_path / "encoder", None)
    texts = ["a cat", "a kitten", "the barn"]
    requests = [line(text, {"input": text}, "/v1/embeddings") for text in texts] + [line("chat")]
    result = regard("batch", folder, write(tmp_path / "in.jsonl", requests), tmp_path / "out.jsonl")
    assert result.exit_code == 1 and "1 of 4 requests failed (custom_id 'chat')" in result.stderr
    found = read(tmp_path / "out.jsonl")
    llm = load(folder, device="cpu")
    for text in texts:
        vector = torch.tensor(found[text]["response"]["body"]["data"][0]["embedding"])
        assert (vector - llm.embed(text)).abs().max() < 1e-5
    assert 400 <= found["chat"]["response"]["status_code"] < 500


KILLED_BATCH = """
import os, signal, sys
from regard.__main__ import main
from regard.cli.batch_files import BatchOutput
written, write = [], BatchOutput.write

def write_or_die(self, *result):
    if len(written) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    written.append(write(self, *result))

BatchOutput.write = write_or_die
sys.argv[0] = "regard"
main()
"""


def test_a_killed_batch_is_continued_without_duplicates(demo_run: Path, tmp_path: Path) -> None:
    body = {"prompt": "Anna is in", "max_tokens": 24, "temperature": 1, "seed": 3}
    source = write(tmp_path / "in.jsonl", [line(f"r{i}", body, "/v1/completions") for i in range(16)])
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-c", KILLED_BATCH, "batch", str(demo_run), str(source), str(out), "--rows", "1"]
    assert subprocess.run(command, stderr=subprocess.DEVNULL).returncode == -signal.SIGKILL
    complete = out.read_bytes()
    assert complete.count(b"\n") == 5 and complete.endswith(b"\n")
    out.write_bytes(complete + b'{"id": "batch_req_1", "custom_id": "r15", "resp')  # torn
    result = regard("batch", demo_run, source, out)
    assert result.exit_code == 0 and "has 5 of 16 results already" in result.stderr
    assert out.read_bytes().startswith(complete)
    found = read(out)
    assert found.keys() == {f"r{i}" for i in range(16)}
    assert len({entry["response"]["body"]["choices"][0]["text"] for entry in found.values()}) == 1  # one seed
    before = out.read_bytes()
    assert "has 16 of 16 results already" in regard("batch", demo_run, source, out).stderr
    assert out.read_bytes() == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no requests"),
        ('{"custom_id": "1"}\nnot json\n', "line 2: not a JSON object with a string custom_id"),
        ('{"custom_id": 1}\n', "line 1: not a JSON object with a string custom_id"),
        ('{"custom_id": "1"}\n\n{"custom_id": "1"}\n', "line 3: custom_id '1' occurs before"),
        ('{"custom_id": "1", "bdoy": {}}\n', "unknown field 'bdoy'"),
    ],
)
def test_an_input_whose_results_could_not_be_assigned_is_refused(demo_run: Path, tmp_path: Path, text, message) -> None:
    (tmp_path / "in.jsonl").write_text(text)
    refused = regard("batch", demo_run, tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert isinstance(refused.exception, ValueError) and message in str(refused.exception)
    assert not (tmp_path / "out.jsonl").exists()


def test_an_output_of_another_input_or_of_a_running_batch_is_refused(demo_run: Path, tmp_path: Path) -> None:
    source, out = write(tmp_path / "in.jsonl", [line("a")]), write(tmp_path / "out.jsonl", [{"custom_id": "b"}])
    before = out.read_bytes()
    assert "line 1: not the result of a request" in str(regard("batch", demo_run, source, out).exception)
    with out.open("ab") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        assert "another process is writing" in str(regard("batch", demo_run, source, out).exception)
    assert out.read_bytes() == before
    out.write_text("my notes")
    assert "line 1: not written by this command" in str(regard("batch", demo_run, source, out).exception)
    assert out.read_text() == "my notes"
    assert isinstance(regard("batch", demo_run, tmp_path / "missing", out).exception, FileNotFoundError)


def test_options_that_exclude_each_other_are_refused(tmp_path: Path) -> None:
    result = regard("batch", tmp_path, tmp_path / "in", tmp_path / "out", "--batch-invariant", "--quantize", "int8")
    assert "--batch-invariant does not support --quantize" in str(result.exception)


def test_a_batch_with_few_bits_a_smaller_cache_and_drafts(demo_run: Path, tmp_path: Path) -> None:
    source, out = write(tmp_path / "in.jsonl", [line("chat")]), tmp_path / "out.jsonl"
    options = ("--quantize", "int8", "--cache", "int8", "--speculate", "ngram")
    result = regard("batch", demo_run, source, out, "--rows", 2, *options)
    assert result.exit_code == 0 and read(out)["chat"]["response"]["status_code"] == 200
    assert all(option in result.stderr for option in options)  # the choices are printed
