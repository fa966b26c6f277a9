"""`regard scale`: a grid is trained, fitted, drawn and resumed; results that exist are fitted; mistakes are refused."""

import json
import re
from pathlib import Path

import pytest
import torch

from regard.cli.scale import progress_bar
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
    regard("scale", "characters", *GRID, *TINY, "--out", grid)
    assert len(starts) == 27


def test_the_bar_names_its_times(grid: Path, capsys: pytest.CaptureFixture) -> None:
    sweep = Sweep.create(grid, "llama", {}, [{"train.steps": "4", "model.width": "8"}], "cpu")
    with progress_bar(sweep):
        pass
    assert re.search(r"run 1 of 1 .* 0% elapsed 0:00:00 left -:--:--", capsys.readouterr().err)


def test_a_budget_chooses_token_counts_once(grid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.cli.sweep.processes", lambda jobs, folder: lambda *_: FakeProcess(1))
    command = ("scale", "characters", "--sizes", "8x1,16x1,24x1", "--budget", 20, *TINY, "--out", grid)
    first = regard(*command)
    assert "token counts for 20 minutes: " in first.output
    assert "trial-001 starts: 8x1, " in first.output and " tokens, lr 0.08" in first.output  # 2e-2 · (128 / 8)^0.5
    trials = Sweep.open(grid).trials
    steps = [int(trial.values["train.steps"]) for trial in trials]
    assert len(steps) == 15 and steps[4] == pytest.approx(16 * steps[0], rel=0.1)
    second = regard(*command)  # the speed of this machine may differ now
    assert "token counts" not in second.output
    assert [t.values for t in Sweep.open(grid).trials] == [t.values for t in trials]
    for changed, message in (
        (("--sizes", "8x1,16x1,32x1"), "a study with --sizes 8x1,16x1,24x1, not with --sizes 8x1,16x1,32x1"),
        (("--budget", 3), "a study with --budget 20.0, not with --budget 3.0"),
        (("--seeds", 2), "a study with --seeds 1, not with --seeds 2"),
        (("--lr-power", 1), "a study with --lr-power 0.5, not with --lr-power 1.0"),
    ):
        refused = str(regard(*command, *changed).exception)  # the last value of an option counts
        assert message in refused and f"regard scale --resume {grid}, or choose another" in refused, refused
    by_tokens = ("scale", "characters", *GRID, *TINY, "--out", grid)
    assert "a study with no --tokens, not with --tokens 3000,6000,12000" in str(regard(*by_tokens).exception)
    assert [t.values for t in Sweep.open(grid).trials] == [t.values for t in trials]


def test_the_speed_for_a_budget_is_that_of_runs_at_a_time(grid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    def measure_speed(*_: object) -> tuple[float, None]:
        threads.append(torch.get_num_threads())
        return 1e-3, None

    monkeypatch.setattr("regard.cli.scale_budget.measure_speed", measure_speed)
    monkeypatch.setattr("regard.cli.sweep.processes", lambda jobs, folder: lambda *_: FakeProcess(1))
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1, 2, 3})
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        sizes = ("--sizes", "8x1,16x1,24x1")
        printed = regard("scale", "characters", *sizes, "--budget", 20, "--jobs", 2, *TINY, "--out", grid).output
        assert torch.get_num_threads() == 3
        command = ("scale", "characters", *sizes, "--budget", 20, "--jobs", 8, *TINY, "--out", f"{grid}-8")
        crowded = regard(*command).output
    finally:
        torch.set_num_threads(before)
    # the runs of each size take 1/16 to 1 of 1e-3 s per token; the last of them ends 3.3125 or 1.9375 times that later
    assert f"20 minutes with 2 runs at a time: {round(60 * 20 / 3.3125e-3 / 16):,}, " in printed
    assert f"20 minutes with 8 runs at a time: {round(60 * 20 / 1.9375e-3 / 16):,}, " in crowded  # four have a core
    assert threads == [2, 2, 2, 1, 1, 1]


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
    for compute in ("nan", "inf", 0, -1):
        refused = regard("scale", "--fit", tmp_path / "x.json", "--compute", 1e9, "--compute", compute)
        assert f"--compute {compute} is not a positive number" in str(refused.exception)
    few = regard("scale", "llama", "--sizes", "32,64", "--tokens", "100k,200k", "--out", tmp_path / "s")
    assert "2 sizes and 2 token counts cannot determine a law" in str(few.exception)
    budget = ("scale", "characters", "--sizes", "8x1,16x1,24x1", *TINY, "--out", tmp_path / "s", "--budget")
    assert "must be a positive number" in str(regard(*budget, "nan").exception)
    assert not (tmp_path / "s").exists()


def test_a_directory_without_a_study_is_refused(tmp_path: Path) -> None:
    overrides = {"train.evaluate_every": "0"}
    Sweep.create(tmp_path / "s", "llama", overrides, [{"train.lr": "1"}], "cpu").write()
    grid = ("scale", "llama", "--sizes", "8x1,16x1,24x1", "--budget", 9, "--out", tmp_path / "s")
    for command in (("scale", "--resume", tmp_path / "s"), grid):
        refused = str(regard(*command).exception)
        assert "holds a sweep, not a scaling study; continue it with: regard sweep --resume" in refused
    values = {"train.steps": "1", "train.seed": "0", "model.width": "12"}
    Sweep.create(tmp_path / "old", "llama", overrides, [values], "cpu").write()
    assert "a study of an earlier version" in str(regard(*grid[:-1], tmp_path / "old").exception)
    for text in ("5", "[1]", "[" * 100_000):
        (tmp_path / "s" / "sweep.json").write_text(text)
        refused = regard("scale", "--resume", tmp_path / "s")
        assert isinstance(refused.exception, ValueError) and "sweep.json cannot be read" in str(refused.exception)


def test_a_far_compute_is_named_and_a_study_without_curves_has_one_panel(tmp_path: Path) -> None:
    rows = [  # no compute is reached by three sizes
        (n, d, BESIROGLU.loss(n, d))
        for n, d in ((1e6, 1e7), (1e6, 2e7), (1e8, 3e8), (1e8, 6e8), (1e10, 1e10), (1e10, 2e10))
    ]
    lines = "".join(f"{n},{d},{loss}\n" for n, d, loss in rows)
    (tmp_path / "runs.csv").write_text("parameters,tokens,loss\n" + lines)
    options = ("scale", "--fit", tmp_path / "runs.csv", "--out", tmp_path / "out", "--compute")
    result = regard(*options, 1.2e22)
    assert result.exit_code == 0, result.exception
    assert "--compute 1.2e+22 is 10 times" not in result.output
    assert "C = 6·N·D" in result.stdout and "counted FLOPs" in result.stdout
    assert "no IsoFLOP curves: no compute lies between two token counts of at least three sizes" in result.stdout
    page = (tmp_path / "out" / "report.html").read_text()
    assert "There are no IsoFLOP curves" in page and page.count("data:image/png;base64") == 2
    width = int.from_bytes((tmp_path / "out" / "isoflop.png").read_bytes()[16:20])
    assert width < int.from_bytes((tmp_path / "out" / "scaling.png").read_bytes()[16:20]) * 0.6
    assert "--compute 1.2e+23 is 100 times that of the largest run" in regard(*options, 1.2e23).stderr
