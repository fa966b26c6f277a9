"""`regard runs`: listing, showing and comparing runs that are finished, stopped, running or damaged."""

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from regard.report.terminal import text_plot
from regard.training.history import Curve, CurvePoint, read_history
from regard.training.run import Run
from regard.training.run_summary import differing_values, summarize_run
from tests.cli.conftest import regard

CONFIG = {
    "model": {"kind": "decoder", "width": 8, "layers": [{"kind": "repeat", "times": 2}]},
    "train": {"steps": 4, "lr": 0.001, "schedule": {"kind": "cosine", "warmup": 1}},
    "data": {"source": "text", "path": "books/my.txt"},
}


def step(number: int, loss: float | None = None, tokens: int = 10, seconds: float = 0.5) -> dict[str, Any]:
    loss = 4.0 / number if loss is None else loss
    rate = {"seconds": seconds, "tokens_per_second": tokens / seconds}
    return {"step": number, "loss": loss, "lr": 1e-3, "tokens": tokens * number, **rate}


def evaluation(number: int, loss: float) -> dict[str, Any]:
    return {"step": number, "held_out_loss": loss}


def write_run(path: Path, records: Iterable[dict[str, Any]] = (), checkpoint: int | None = None, **config: Any) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(CONFIG | config))
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    if checkpoint is not None:
        folder = path / "checkpoints" / f"step-{checkpoint:06d}"
        folder.mkdir(parents=True)
        header = json.dumps(
            {"__metadata__": {}, "w": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]}}
        ).encode()
        (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(48))
        size = (folder / "model.safetensors").stat().st_size
        (folder / "manifest.json").write_text(
            json.dumps({"files": {"model.safetensors": {"bytes": size, "sha256": ""}}})
        )
    return path


FINISHED = [step(1), step(2), evaluation(2, 1.5), step(3), step(4), evaluation(4, 1.75)]


def listed(*arguments: object) -> list[dict[str, Any]]:
    result = regard("runs", *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_finished_run_is_listed_with_its_losses_and_speed(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a", FINISHED, checkpoint=4)
    (found,) = listed(tmp_path / "runs")
    expected = {
        "run": str(tmp_path / "runs" / "a"), "state": "finished", "model": "decoder", "parameters": 12,
        "objective": "next_token", "data": "my.txt", "step": 4, "steps": 4, "tokens": 40, "loss": 1.0,
        "held_out_loss": 1.75, "best_held_out_loss": 1.5, "best_step": 2, "tokens_per_second": 20.0, "problems": [],
    }  # fmt: skip
    assert found == expected | {"changed": found["changed"]} and abs(found["changed"] - time.time()) < 600


def test_states_of_runs(tmp_path: Path) -> None:
    write_run(tmp_path / "finished", FINISHED, checkpoint=4)
    write_run(tmp_path / "stopped", FINISHED[:3], checkpoint=2)
    write_run(tmp_path / "started")
    write_run(tmp_path / "no-config", FINISHED, checkpoint=4)
    (tmp_path / "no-config" / "config.json").unlink()
    write_run(tmp_path / "broken-config", FINISHED)
    (tmp_path / "broken-config" / "config.json").write_text("{")
    write_run(tmp_path / "truncated", FINISHED, checkpoint=4)
    (tmp_path / "truncated" / "checkpoints" / "step-000004" / "model.safetensors").write_bytes(b"")
    write_run(tmp_path / "running", FINISHED[:2])
    with Run(tmp_path / "running").locked():
        found = {Path(run["run"]).name: run for run in listed(tmp_path)}
    assert {name: run["state"] for name, run in found.items()} == {
        "finished": "finished", "stopped": "stopped", "started": "stopped", "no-config": "damaged",
        "broken-config": "damaged", "truncated": "damaged", "running": "running",
    }  # fmt: skip
    assert found["no-config"]["problems"] == ["config.json is missing"]
    assert "another size" in found["truncated"]["problems"][0]
    assert summarize_run(tmp_path / "running").state == "stopped"  # the lock was released
    table = regard("runs", tmp_path)
    assert table.exit_code == 0 and "2/4" in table.output and f"{tmp_path / 'no-config'}: config.json" in table.output


def test_damaged_and_partial_lines_are_skipped(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", FINISHED[:3])
    faults = [b"not json\n", b'{"loss": 1}\n', b'{"step": "7", "loss": 1.0}\n', b"[1, 2]\n", b"\xff\x00\n", b"\n"]
    others = [b'{"step": 3, "loss": null, "skipped": "nan"}\n', b'{"step": 4, "loss": 0.5, "tokens": 40}\n']
    with (run / "metrics.jsonl").open("ab") as stream:
        stream.write(b"".join(faults + others) + b'{"step": 5, "loss": 0.2')
    history = read_history(run / "metrics.jsonl")
    assert [point.step for point in history.points] == [1, 2, 4]
    assert (history.step, history.loss, history.tokens, history.damaged_lines) == (4, 0.5, 40, 5)
    quick = read_history(run / "metrics.jsonl", max_points=0)
    assert (quick.step, quick.loss, quick.evaluations) == (4, 0.5, history.evaluations) and not quick.points
    assert read_history(tmp_path / "missing.jsonl").step == 0
    for command in (("runs", tmp_path), ("runs", "show", run), ("runs", "compare", run, run)):
        result = regard(*command)
        assert result.exit_code == 0 and "damaged lines in metrics.jsonl" in result.output


def test_settings_that_were_changed_on_resume_are_those_of_the_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", FINISHED, checkpoint=4)
    (run / "changes.jsonl").write_text(
        '{"step": 4, "overrides": {"train.steps": 8, "train.schedule.warmup": 2}}\nnot json\n'
    )
    summary = summarize_run(run)
    assert (summary.state, summary.steps, summary.config["train"]["schedule"]["warmup"]) == ("stopped", 8, 2)


def test_a_huge_log_is_reduced_to_means_of_equally_many_steps() -> None:
    curve = Curve(max_points=50)
    for number in range(1, 10_001):
        curve.add(CurvePoint(number, 10 * number, float(number % 2)))
    points = curve.flush()
    assert 50 <= len(points) <= 100 and points[-1].step == 10_000
    assert {point.loss for point in points} == {0.5}


def test_show_plots_the_curve(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", FINISHED[:3], checkpoint=2)
    result = regard("runs", "show", run)
    assert result.exit_code == 0 and "●" in result.output and "1.5000 at step 2" in result.output
    assert f"regard train --resume {run}" in result.output
    data = json.loads(regard("runs", "show", run, "--json").stdout)
    assert data["points"] == [{"step": 1, "tokens": 10, "loss": 4.0}, {"step": 2, "tokens": 20, "loss": 2.0}]
    assert data["evaluations"] == [{"step": 2, "tokens": 20, "loss": 1.5}] and data["config"] == CONFIG
    assert "holds no run" in str(regard("runs", "show", tmp_path).exception)


def test_the_plot_places_points_from_the_largest_to_the_smallest_loss() -> None:
    lines = text_plot([(0, 1.0), (100, 0.5)], [(100, 0.5)], width=10, height=4)
    assert lines[0].startswith("  1 │⠁") and lines[3].startswith("0.5 │") and lines[3].endswith("●")
    assert lines[-1].split() == ["0", "100"] and len(lines) == 6
    assert text_plot([]) == [] and len(text_plot([(5, 2.0)])) == 14


def test_compare_shows_losses_at_equal_tokens_and_the_differences(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", FINISHED, checkpoint=4)
    records = [step(number, 8.0 / number, tokens=20) for number in range(1, 5)] + [evaluation(4, 2.5)]
    b = write_run(tmp_path / "b", records, train=CONFIG["train"] | {"lr": 0.01})
    data = json.loads(regard("runs", "compare", a, b, "--json").stdout)
    assert data["recipes"] == {"train.lr": [0.001, 0.01]}
    assert [row["tokens"] for row in data["losses"]] == [10, 20, 30, 40]
    assert data["losses"][-1]["runs"] == [
        {"loss": 1.0, "held_out_loss": 1.75},
        {"loss": 4.0, "held_out_loss": None},
    ]
    by_steps = json.loads(regard("runs", "compare", a, b, "--json", "--by", "steps").stdout)
    assert by_steps["losses"][-1]["runs"][1] == {"loss": 2.0, "held_out_loss": 2.5}
    table = regard("runs", "compare", a, b)
    assert table.exit_code == 0 and "train.lr" in table.output and "1.0000 / 1.7500" in table.output


def test_tables_of_another_kind_are_compared_as_a_whole() -> None:
    wsd = {"train": {"steps": 4, "schedule": {"kind": "wsd", "warmup": 1, "decay": 0.2}}, "layers": [1, 2]}
    cosine = {"train": {"steps": 4, "schedule": {"kind": "cosine", "warmup": 1}}, "layers": [1, 3], "seed": 1}
    assert differing_values([wsd, cosine]) == {
        "train.schedule": [wsd["train"]["schedule"], cosine["train"]["schedule"]],
        "layers.1": [2, 3],
        "seed": [None, 1],
    }


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_compare_draws_a_plot(tmp_path: Path, suffix: str) -> None:
    runs = [write_run(tmp_path / name, FINISHED) for name in ("a", "b")]
    picture = tmp_path / f"losses{suffix}"
    assert regard("runs", "compare", *runs, "--plot", picture).exit_code == 0
    assert picture.stat().st_size > 5000
    assert "neither a .png nor a .svg" in str(regard("runs", "compare", *runs, "--plot", "a.jpeg").exception)


def test_a_trained_run_is_listed(demo_run: Path) -> None:
    (found,) = listed(demo_run)
    assert (found["state"], found["step"], found["steps"], found["data"]) == ("finished", 3, 3, "world")
    summary = json.loads((demo_run / "summary.json").read_text())
    assert found["parameters"] == summary["parameters"] and found["held_out_loss"] == summary["val_loss"]


def test_missing_folders_and_too_few_runs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    empty = regard("runs")
    assert empty.exit_code == 0 and "no runs in runs; start one" in empty.output
    assert "there is no folder nowhere" in str(regard("runs", "nowhere").exception)
    assert regard("runs", "compare", write_run(tmp_path / "a")).exit_code == 2
