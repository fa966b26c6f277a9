"""Every lab runs at its smallest size, writes its findings, and has a claim that is read without importing it."""

import json
from typing import get_args

import pytest

from regard.labs import LABS, claim, documentation, module_of
from regard.labs.bench import Bench, Size
from regard.labs.findings import Check, Findings, Plot
from regard.labs.report import write
from tests.cli.conftest import regard
from tests.ledger import comments


@pytest.mark.parametrize("name", LABS)
def test_every_lab_runs_at_its_smallest_size_and_writes_its_findings(name, tmp_path):
    findings = module_of(name).run(Bench(size="quick"))
    write(tmp_path, name, documentation(name), findings, {"seed": 0})
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert result["verdict"] == findings.verdict
    assert {row.keys() == findings.table[0].keys() for row in findings.table} == {True}
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert claim(name) in (tmp_path / "report.html").read_text(encoding="utf-8").replace("&#x27;", "'")


@pytest.mark.parametrize("name", LABS)
def test_every_lab_cites_a_row_of_the_ledger(name):
    source = module_of(name).__file__
    assert source is not None
    with open(source, encoding="utf-8") as file:
        assert list(comments(file.read()))


def findings(*holds: bool) -> Findings:
    return Findings([{"n": 1}], [Check("a", "b", held) for held in holds], [Plot("x", "y", {"line": [(0, 1)]})])


def test_the_verdict_follows_from_the_checks():
    assert findings(True, True).verdict == "the claim holds here"
    assert findings(True, False).verdict == "the claim holds in part: 1 of 2"
    assert findings(False).verdict == "the claim does not hold here"


def test_the_command_lists_all_labs_and_suggests_the_nearest_name():
    listed = regard("lab", "--list").stdout.splitlines()
    assert [line.split()[0] for line in listed] == list(LABS)
    wrong = regard("lab", "gradient-through-time")
    assert wrong.exit_code == 1 and "did you mean 'gradients-through-time'?" in str(wrong.exception)


def test_a_small_run_differs_from_a_full_one_in_a_quarter_of_the_training():
    picked = {size: (Bench(size=size).pick(8, 2), Bench(size=size).training(1000, 2)) for size in get_args(Size)}
    assert picked == {"full": (8, 1000), "small": (8, 250), "quick": (2, 2)}
    assert Bench(size="small").training(15.0, 0.05) == 3.0
    with pytest.raises(ValueError, match="size='tiny' is not a size of labs; choose one of quick, small, full"):
        Bench(size="tiny")


@pytest.mark.parametrize("arguments, size", [(["--quick"], "quick"), (["--size", "quick"], "quick")])
def test_the_command_runs_a_lab_at_a_size(tmp_path, arguments, size):
    ran = regard("lab", "universal-approximation", "--out", tmp_path, *arguments)
    assert ran.exit_code == 0 and "not meaningful" in ran.stdout
    result = json.loads((tmp_path / "universal-approximation" / "result.json").read_text(encoding="utf-8"))
    assert result["settings"]["size"] == size
