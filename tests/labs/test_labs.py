"""Labs: every one runs (at its smallest), writes what it found, and says what it claims without being imported."""

import json
import subprocess
import sys

import pytest

from regard.labs import LABS, claim, documentation, module_of
from regard.labs.bench import Bench
from regard.labs.findings import Check, Findings, Plot
from regard.labs.report import write
from tests.ledger import comments


@pytest.mark.parametrize("name", LABS)
def test_every_lab_runs_at_its_smallest_and_writes_its_findings(name, tmp_path):
    findings = module_of(name).run(Bench(quick=True))
    write(tmp_path, name, documentation(name), findings, {"seed": 0})
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert result["verdict"] == findings.verdict
    assert {row.keys() == findings.table[0].keys() for row in findings.table} == {True}
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert claim(name) in (tmp_path / "report.html").read_text(encoding="utf-8").replace("&#x27;", "'")


@pytest.mark.parametrize("name", LABS)
def test_every_lab_cites_the_claim_it_tries(name):
    source = module_of(name).__file__
    assert source is not None
    with open(source, encoding="utf-8") as file:
        assert list(comments(file.read()))


def findings(*holds: bool) -> Findings:
    return Findings([{"n": 1}], [Check("a", "b", held) for held in holds], [Plot("x", "y", {"line": [(0, 1)]})])


def test_a_verdict_is_read_off_the_checks():
    assert findings(True, True).verdict == "the claim holds here"
    assert findings(True, False).verdict == "the claim holds in part: 1 of 2"
    assert findings(False).verdict == "the claim does not hold here"


def regard(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "regard", "lab", *arguments], capture_output=True, text=True)


def test_the_command_lists_them_all_and_answers_a_wrong_name():
    listed = regard("--list").stdout.splitlines()
    assert [line.split()[0] for line in listed] == list(LABS)
    wrong = regard("gradient-through-time")
    assert wrong.returncode == 1 and "did you mean 'gradients-through-time'?" in wrong.stderr
