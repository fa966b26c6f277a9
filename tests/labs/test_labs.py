"""Every lab runs at its smallest size. The verdicts of the cheap labs are checked with several seeds."""

import json
import math
import runpy
from pathlib import Path
from typing import get_args

import pytest

from regard.labs import LABS, claim, documentation, module_of
from regard.labs.experiment import Bench, Check, Findings, Measured, Plot, Size, combine, run_seeds
from regard.labs.report import error_bars, write
from tests.cli.conftest import regard
from tests.ledger import comments


@pytest.mark.parametrize("name", LABS)
def test_every_lab_runs_at_its_smallest_size_and_writes_its_findings(name, tmp_path):
    findings = run_seeds(module_of(name).run, Bench(size="quick"), 2 if name in CHECKED else 1)
    write(tmp_path, name, documentation(name), findings, {"size": "quick"})
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert result["verdict"] == findings.verdict and result["seeds"] == list(findings.seeds)
    assert {row.keys() == findings.table[0].keys() for row in findings.table} == {True}
    assert [plot["lines"].keys() for plot in result["plots"]] == [plot.lines.keys() for plot in findings.plots]
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert claim(name) in (tmp_path / "report.html").read_text(encoding="utf-8").replace("&#x27;", "'")


CHECKED = {"gradients-through-time": 4, "universal-approximation": 2}  # name: number of predictions


@pytest.mark.parametrize("name", CHECKED)
def test_predictions_of_cheap_labs_hold_with_seeds_that_were_not_used_to_design_them(name):
    findings = run_seeds(module_of(name).run, Bench(seed=100), 2)
    assert findings.verdict == "the claim holds here with each of 2 seeds", findings.checks
    assert [check.seeds for check in findings.checks] == ["2 of 2"] * CHECKED[name]


@pytest.mark.parametrize("name", LABS)
def test_every_lab_cites_a_row_of_the_ledger_and_has_several_seeds(name):
    source = module_of(name).__file__
    assert source is not None
    with open(source, encoding="utf-8") as file:
        assert list(comments(file.read()))
    assert LABS[name] >= 3


def findings(*holds: bool, value: float = 1, last: int = 1, remark: str = "") -> Findings:
    lines = {"line": [(x, value + x) for x in range(last + 1)]}
    checks = [Check(f"check {i}", f"{value:g}", held) for i, held in enumerate(holds)]
    return Findings([{"n": 8, "name": "a", "value": value}], checks, [Plot("x", "y", lines)], remark)


def test_the_verdict_follows_from_the_checks():
    assert findings(True, True).verdict == "the claim holds here"
    assert findings(True, False).verdict == "the claim holds in part: 1 of 2 predictions"
    assert findings(False).verdict == "the claim does not hold here"


def test_a_prediction_holds_if_it_holds_with_every_seed():
    found = combine({4: findings(True, True), 5: findings(True, False), 6: findings(True, True, value=2)})
    assert [(check.holds, check.seeds, check.observed) for check in found.checks] == [
        (True, "3 of 3", "1; 2"),
        (False, "2 of 3", "1; 2"),
    ]
    assert found.seeds == (4, 5, 6)
    assert found.verdict == "the claim holds in part: 1 of 2 predictions with each of 3 seeds"
    assert combine({0: findings(True), 1: findings(True)}).verdict == "the claim holds here with each of 2 seeds"


def test_results_of_several_seeds_are_combined_to_mean_and_range():
    found = combine({0: findings(True, value=1, last=2), 1: findings(True, value=4)})
    assert found.table == [{"n": 8, "name": "a", "value": Measured(2.5, 1, 4)}]
    assert str(Measured(2.5, 1, 4)) == "2.5 [1, 4]"
    (plot,) = found.plots
    assert plot.lines == {"line": [(0, 2.5), (1, 3.5), (2, 3)]}  # the second run ended earlier
    assert plot.ranges == {"line": [(1, 4), (2, 5), (3, 3)]}
    assert combine({0: findings(True)}).plots[0].ranges == {}
    with pytest.raises(AssertionError, match="the remark differs between seeds"):
        combine({0: findings(True), 1: findings(True, remark="another")})


def test_the_points_of_plots_are_kept_and_a_missing_matplotlib_loses_only_the_picture(tmp_path, monkeypatch):
    monkeypatch.setattr("regard.labs.report.find_spec", lambda name: None)
    found = combine({0: findings(True), 1: findings(True, value=3)})
    write(tmp_path, "a-lab", "A claim.", found, {"size": "quick"})
    text = (tmp_path / "result.json").read_text(encoding="utf-8")
    (plot,) = json.loads(text)["plots"]
    assert plot["lines"] == {"line": [[0, 2, 1, 3], [1, 3, 2, 4]]}
    assert "[ 0, 2.0, 1, 3 ]" in text  # a point on one line
    assert not (tmp_path / "plot.png").exists()
    assert "No plot: matplotlib is not installed" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_error_bars_reach_from_the_smallest_to_the_largest_value():
    assert error_bars([2.0, 5.0], [1.5, 5.0], [4.0, 5.0]) == [[0.5, 0.0], [2.0, 0.0]]
    assert error_bars([1.0], [1.0 + 1e-16], [1.0]) == [[0.0], [0.0]]


def test_each_run_has_the_next_seed():
    seeds_used = []

    def experiment(bench: Bench) -> Findings:
        seeds_used.append(bench.seed)
        return findings(True)

    assert run_seeds(experiment, Bench(seed=7), 3).seeds == (7, 8, 9) and seeds_used == [7, 8, 9]
    with pytest.raises(ValueError, match="seeds=0 is not positive; choose 1 or more"):
        run_seeds(experiment, Bench(), 0)


def test_the_command_lists_all_labs_and_suggests_the_nearest_name():
    listed = regard("lab", "--list").stdout.splitlines()
    assert [line.split()[0] for line in listed] == list(LABS)
    misspelled = regard("lab", "gradient-through-time")
    assert misspelled.exit_code == 1 and "did you mean 'gradients-through-time'?" in str(misspelled.exception)


def test_a_small_run_trains_for_a_quarter_of_a_full_one():
    settings = {size: (Bench(size=size).setting(8, 2), Bench(size=size).training(1000, 2)) for size in get_args(Size)}
    assert settings == {"full": (8, 1000), "small": (8, 250), "quick": (2, 2)}
    assert Bench(size="small").training(15.0, 0.05) == 3.0
    with pytest.raises(ValueError, match="size='tiny' is not a size of labs; choose one of quick, small, full"):
        Bench(size="tiny")


@pytest.mark.parametrize(
    ("arguments", "seeds"),
    [(["--quick"], [0, 1, 2, 3, 4]), (["--size", "quick", "--seed", "3", "--seeds", "2"], [3, 4])],
)
def test_the_command_runs_a_lab_with_several_seeds(tmp_path, arguments, seeds):
    ran = regard("lab", "universal-approximation", "--out", tmp_path, *arguments)
    printed = " ".join(ran.stdout.split())
    assert ran.exit_code == 0 and "not meaningful" in printed
    assert f"of {len(seeds)} seeds" in printed and f"Means over seeds {', '.join(map(str, seeds))}" in printed
    result = json.loads((tmp_path / "universal-approximation" / "result.json").read_text(encoding="utf-8"))
    assert result["settings"]["size"] == "quick" and result["seeds"] == seeds
    cell = result["table"][0]["outside"]
    assert cell["low"] < cell["mean"] < cell["high"] and math.isfinite(cell["mean"])
    points = [point for plot in result["plots"] for line in plot["lines"].values() for point in line]
    assert points and all(low <= y <= high for _, y, low, high in points)


DOCS = Path(__file__).parents[2] / "docs"
RESULTS = sorted((DOCS / "labs").glob("*.json"))


def test_the_labs_page_shows_the_recorded_results():
    text = (DOCS / "topics" / "labs.md").read_text(encoding="utf-8")
    assert runpy.run_path(str(DOCS / "generate_labs.py"))["page"](text) == text, "run python docs/generate_labs.py"
    assert len(RESULTS) == text.count("\nVerdict: **")


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_recorded_results_belong_to_the_current_lab(path):
    result = json.loads(path.read_text(encoding="utf-8"))
    assert result["claim"] == claim(path.stem), "the claim has changed since the lab was run: run it again"
    assert result["settings"]["size"] != "quick"
    assert {check["seeds"].partition(" of ")[2] for check in result["checks"]} == {str(len(result["seeds"]))}
