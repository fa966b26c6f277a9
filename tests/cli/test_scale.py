"""`regard scale`: a grid is trained, fitted, drawn and resumed; results that exist are fitted; mistakes are refused."""

import json
from pathlib import Path

import pytest

from regard.planning.scaling import BESIROGLU
from regard.training.sweep import Sweep
from tests.cli.conftest import regard
from tests.cli.test_sweep import FakeProcess

TINY = ("--data.source=world", "--data.level=1", "--data.task=document", "--data.story_weight=1", "--data.rows=2",
        "--data.length=64", "--data.held_out=2", "--tokenizer.documents=40", "--train.lr=2e-2",
        "--device", "cpu")  # fmt: skip
GRID = ("--sizes", "8x1,16x1,24x1", "--tokens", "3k,6k,12k")


def train_here(jobs: int, folder: str):
    """Trains in this process instead of a new one."""

    def start(arguments: list[str], output: Path, slot: int) -> FakeProcess:
        result = regard(*arguments)
        output.write_text(result.output)
        return FakeProcess(result.exit_code)

    return start


@pytest.fixture
def grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("regard.training.sweep.POLL_SECONDS", 0.001)
    monkeypatch.setattr("regard.cli.sweep.processes", train_here)
    return tmp_path / "scale"


@pytest.mark.slow  # nine runs
def test_a_grid_is_trained_fitted_drawn_and_resumed(grid: Path) -> None:
    result = regard("scale", "characters", *GRID, *TINY, "--out", grid, "--compute", 1e9)
    assert result.exit_code == 0, result.output
    assert "L(N, D) = " in result.stdout and "law: best N" in result.stdout and "1e+09" in result.stdout
    data = json.loads((grid / "scaling.json").read_text())
    assert [run["parameters"] for run in data["runs"][::3]] == [860, 3000, 6996]  # planned, without the embedding
    assert [run["steps"] for run in data["runs"][:3]] == [23, 47, 94]
    rates = [run["lr"] for run in data["runs"][::3]]
    assert rates == pytest.approx([2e-2 * (128 / width) ** 0.5 for width in (8, 16, 24)], rel=1e-3)
    for run in data["runs"]:  # attention and the output layer are counted too
        assert run["flops"] > 6 * run["parameters"] * run["tokens"] and run["loss"] > 0
    assert data["runs"][0]["loss"] > data["runs"][2]["loss"] > data["runs"][8]["loss"]
    assert (grid / "scaling.png").stat().st_size > 5000 and (grid / "isoflop.png").stat().st_size > 5000
    assert (grid / "report.html").read_text().count("data:image/png;base64") == 2
    first = (grid / "trial-001" / "metrics.jsonl").stat().st_mtime_ns
    again = regard("scale", "--resume", grid, "--json")
    assert json.loads(again.stdout)["runs"] == data["runs"]
    assert (grid / "trial-001" / "metrics.jsonl").stat().st_mtime_ns == first
    fitted = json.loads(regard("scale", "--fit", grid / "scaling.json", "--json").stdout)
    assert fitted["law"] == data["law"] and "optima" in fitted


def test_a_stopped_grid_goes_on_and_failures_are_left_out(grid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[list[str]] = []

    def fail(jobs: int, folder: str):
        def start(arguments: list[str], output: Path, slot: int) -> FakeProcess:
            starts.append(arguments)
            output.write_text("regard: killed\n")
            return FakeProcess(1)

        return start

    monkeypatch.setattr("regard.cli.sweep.processes", fail)
    refused = regard("scale", "characters", *GRID, *TINY, "--out", grid)
    assert "0 runs cannot determine the five constants" in str(refused.exception)
    assert len(starts) == 9 and "trial-009 failed and is left out of the fit: killed" in refused.output
    assert [trial.state for trial in Sweep.open(grid).trials] == ["failed"] * 9
    regard("scale", "--resume", grid)
    assert len(starts) == 18  # they are tried again


def test_a_budget_chooses_token_counts_once(grid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.cli.sweep.processes", lambda jobs, folder: lambda *_: FakeProcess(1))
    command = ("scale", "characters", "--sizes", "8x1,16x1,24x1", "--budget", 20, *TINY, "--out", grid)
    first = regard(*command)
    assert "token counts for 20 minutes" in first.output
    trials = Sweep.open(grid).trials
    steps = [int(trial.values["train.steps"]) for trial in trials]
    assert len(steps) == 15 and steps[4] == pytest.approx(16 * steps[0], rel=0.1)
    second = regard(*command)  # the speed of this machine may differ now
    assert "token counts" not in second.output
    assert [t.values for t in Sweep.open(grid).trials] == [t.values for t in trials]


def test_results_that_exist_are_fitted(tmp_path: Path) -> None:
    rows = [(n, d, BESIROGLU.loss(n, d)) for n in (1e7, 3e7, 1e8) for d in (1e8, 1e9, 1e10)]
    (tmp_path / "runs.csv").write_text("parameters,tokens,loss\n" + "".join(f"{n},{d},{loss}\n" for n, d, loss in rows))
    result = regard("scale", "--fit", tmp_path / "runs.csv", "--compute", 1e21, "--out", tmp_path / "out", "--json")
    data = json.loads(result.stdout)
    assert data["law"]["size_exponent"] == pytest.approx(BESIROGLU.size_exponent, rel=0.01)
    assert data["optima"][0]["parameters"]["value"] == pytest.approx(BESIROGLU.optimum(1e21)[0], rel=0.05)
    assert (tmp_path / "out" / "report.html").exists()


def test_wrong_usage_is_refused(tmp_path: Path) -> None:
    assert regard("scale").exit_code == 2
    assert regard("scale", "llama").exit_code == 2
    assert regard("scale", "llama", *GRID, "--budget", 5).exit_code == 2
    assert regard("scale", "--resume", tmp_path, "--sizes", "1,2,3").exit_code == 2
    (tmp_path / "runs.csv").write_text("parameters,tokens,loss\n")
    for option in (("--seeds", 2), ("--lr-power", 1), ("--device", "cpu"), ("--jobs", 2), ("--ray",)):
        refused = regard("scale", "--fit", tmp_path / "runs.csv", *option)
        assert refused.exit_code == 2 and f"{option[0]} has no effect with --fit" in refused.output
    refused = regard("scale", "--resume", tmp_path, "--seeds", 2)
    assert refused.exit_code == 2 and "--seeds has no effect with --resume" in refused.output
    few = regard("scale", "llama", "--sizes", "32,64", "--tokens", "100k,200k", "--out", tmp_path / "s")
    assert "2 sizes and 2 token counts cannot determine a law" in str(few.exception)
    assert "not a positive number" in str(regard("scale", "--fit", tmp_path / "x.json", "--compute", 0).exception)
    assert not (tmp_path / "s").exists()
