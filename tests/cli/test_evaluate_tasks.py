"""`regard eval MODEL --tasks …` as a user calls it."""

import json
from pathlib import Path

import pytest
import torch

from regard.checkpoint.model_folder import save
from regard.engine.engine import Engine
from regard.server.app import create_app
from regard.server.served_model import ServedModel
from tests.cli.conftest import regard
from tests.evals.tiny_decoder import TEXT, tiny_decoder
from tests.server.conftest import serve


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tasks")
    llm = tiny_decoder(context=128, dtype=torch.float32)
    save(llm.model, path / "model", llm.tokenizer)
    rows = [{"prompt": "The lamp is in", "choices": ["the box", "a"], "answer": n % 2, "n": n} for n in range(3)]
    (path / "choices.jsonl").write_text("\n".join(map(json.dumps, rows)))
    shot = {"prompt": "They are", "choices": ["a", "b"], "answer": 0, "n": 9}
    (path / "shots.jsonl").write_text(json.dumps(shot))
    task = 'kind = "choice"\ndata = "choices.jsonl"\nshots = "shots.jsonl"\nprompt = "{{ n }} {{ prompt }}"'
    (path / "task.toml").write_text(task)
    (path / "outputs.jsonl").write_text(json.dumps({"prompt": "The box", "answer": "red"}))
    (path / "book.txt").write_text(TEXT)
    return path


def test_several_tasks_are_printed_and_written(folder: Path, tmp_path: Path) -> None:
    tasks = ("--tasks", f"{folder}/task.toml,{folder}/outputs.jsonl", "--tasks", folder / "book.txt")
    printed = regard("eval", folder / "model", *tasks, "--out", tmp_path / "r.json")
    assert printed.exit_code == 0, printed.exception
    assert all(name in printed.stdout for name in ("accuracy_norm", "rouge_l", "bits_per_byte", "written:"))
    found = json.loads(regard("eval", "tasks", folder / "model", *tasks, "--json").stdout)
    written = json.loads((tmp_path / "r.json").read_text())
    assert [task["task"] for task in found["tasks"]] == ["task", "outputs", "book"]
    assert [task.pop("samples") is not None for task in written["tasks"]] == [True] * 3 and written == found


def test_limit_shots_context_and_chat(folder: Path) -> None:
    options = ("--tasks", folder / "task.toml", "--limit", 2, "--shots", 1, "--chat", "--context", 32, "--json")
    found = json.loads(regard("eval", folder / "model", *options).stdout)
    assert (found["chat"], found["window"]) == (True, 32)
    assert (found["tasks"][0]["rows"], found["tasks"][0]["shots"]) == (2, 1)
    assert set(found["tasks"][0]["metrics"]["accuracy"]) == {"value", "error"}


def test_truncated_rows_are_said(folder: Path) -> None:
    printed = regard("eval", folder / "model", "--tasks", folder / "task.toml", "--shots", 1, "--context", 8).stdout
    assert "task: 3 rows, longer than 8 tokens, were truncated from the left" in printed


def test_a_server_has_the_results_of_its_model(folder: Path) -> None:
    llm = tiny_decoder(context=128, dtype=torch.float32)
    with serve(create_app([ServedModel("tiny", llm.tokenizer, Engine(llm.model, rows=4))])) as port:
        url, options = f"http://127.0.0.1:{port}", ("--tasks", f"{folder}/task.toml,{folder}/book.txt", "--json")
        tasks = [json.loads(regard("eval", name, *options).stdout)["tasks"] for name in (url, folder / "model")]
    for one, other in zip(*tasks, strict=True):
        for name, metric in other["metrics"].items():
            assert one["metrics"][name]["value"] == pytest.approx(metric["value"], rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("smolm2", "--tasks", "world-choices"), "smollm2"),
        (("{model}", "--tasks", "world-choice"), "did you mean 'world-choices'?"),
        (("{model}", "--tasks", "nothing.jsonl"), "nothing.jsonl is not a file or folder"),
        (("{model}", "--tasks", "world-stories", "--shots", "2"), "--shots has no effect"),
        (("{model}", "--tasks", "world-stories", "--out", "/nonexistent/r.json"), "there is no folder /nonexistent"),
        (
            ("{model}", "--tasks", "{model}/../task.toml", "--out", "{model}/../choices.jsonl"),
            "exists and is no result of an evaluation",
        ),
        (
            ("{model}", "--tasks", "{model}/../outputs.jsonl", "--out", "{model}/../outputs.jsonl"),
            "choose another name",
        ),
        (("http://127.0.0.1:9", "--tasks", "world-stories"), "does not answer"),
    ],
)
def test_errors_say_what_to_do(folder: Path, arguments: tuple[str, ...], message: str) -> None:
    result = regard("eval", *(argument.format(model=folder / "model") for argument in arguments))
    assert result.exit_code == 1 and message in str(result.exception)


def test_no_task_is_refused(folder: Path) -> None:
    for tasks in ("", ",", " , "):
        result = regard("eval", folder / "model", "--tasks", tasks)
        assert result.exit_code == 2 and "--tasks names no task" in result.output


def test_an_output_is_checked_before_the_model_is_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.cli.evaluate_tasks.open_local", lambda *_: pytest.fail("loaded"))
    monkeypatch.setattr("regard.cli.open_model.open_model", lambda *_: pytest.fail("loaded"))
    for command in (("eval", folder / "model", "--tasks", folder / "book.txt"), ("eval", "long", folder / "model")):
        result = regard(*command, "--out", folder / "book.txt" / "r")
        assert isinstance(result.exception, ValueError) and f"--out {folder / 'book.txt' / 'r'}" in str(
            result.exception
        )


def test_options_of_the_other_kind_of_model_are_refused(folder: Path) -> None:
    here, server = folder / "model", "http://127.0.0.1:9"
    for model, option in ((here, ("--name", "a")), (here, ("--key", "k")), (server, ("--device", "cpu"))):
        result = regard("eval", model, "--tasks", "world-stories", *option)
        assert result.exit_code == 2 and f"{option[0]} is for" in result.output
