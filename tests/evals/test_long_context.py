"""Long-context evaluation: cells by task, length and depth, the effective length, and its report."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from regard.data.world.long_texts import LongQuestion
from regard.evals.long_context import LongCell, LongReport, measure_context
from regard.report.long_report import write_long_report
from tests.cli.conftest import regard


def words(text: str) -> int:
    return len(text.split())


def reads_the_last(limit: int):
    """A reader that knows the answer if the sentences that state it are among the last `limit` words."""

    def answers(questions: Sequence[LongQuestion]) -> list[str]:
        return [
            f"It is in the {each.answer}."
            if each.answer in " ".join(each.text.split()[-limit:]).lower()
            else "Nowhere."
            for each in questions
        ]

    return answers


@pytest.mark.ledger("long.needle")
def test_a_perfect_and_a_short_sighted_reader() -> None:
    options = ((100, 200, 400), (0.0, 0.5, 1.0), ("needle", "count"), 6)
    perfect = measure_context(lambda questions: [each.answer for each in questions], words, *options)
    assert all(cell.accuracy == 1 for cell in perfect.cells) and perfect.effective_length == 400
    assert perfect.depths("count") == [None] and perfect.depths("needle") == [0.0, 0.5, 1.0]
    asked: list[int] = []
    blind = measure_context(lambda questions: ["?"] * len(questions), words, *options, on_progress=asked.append)
    assert all(cell.correct == 0 for cell in blind.cells) and sum(asked) == 3 * 4 * 6
    assert blind.effective_length is None and blind.verdict.startswith("no effective length: 0% of the answers")
    longest = measure_context(reads_the_last(60), words, (50, 400), (0.0, 1.0), ("needle",), 12)
    accuracy = {(cell.length, cell.depth): cell.accuracy for cell in longest.cells}
    assert accuracy[50, 0.0] == accuracy[50, 1.0] == accuracy[400, 1.0] == 1 and accuracy[400, 0.0] < 0.7


def test_the_effective_length_ends_where_accuracy_falls() -> None:
    def report(*correct: int) -> LongReport:
        return LongReport(tuple(LongCell("needle", 100 << i, 0.5, right, 20) for i, right in enumerate(correct)))

    assert report(20, 17, 17).effective_length == 400
    assert report(20, 16, 20).effective_length == 100  # a recovery does not count
    assert report(10, 9, 8).effective_length == 200
    assert report(9, 9, 9).effective_length is None
    assert report(20, 17, 5).verdict == (
        "effective length: 200 tokens; up to it, the model keeps 85% of its accuracy at 100 tokens (100%)"
    )
    two = LongReport((*report(20).cells, LongCell("hops", 100, 0.5, 10, 20)))
    assert two.accuracy(100) == 0.75 and two.accuracy(100, "hops") == 0.5


def test_the_report_has_a_picture_and_all_numbers(tmp_path: Path) -> None:
    report = measure_context(reads_the_last(60), words, (100, 200), (0.0, 1.0), ("needle", "count"), 2)
    write_long_report(report, "a <model>", tmp_path / "out")
    written = json.loads((tmp_path / "out" / "long.json").read_text())
    assert len(written["cells"]) == 6 and written["effective_length"] == report.effective_length
    page = (tmp_path / "out" / "report.html").read_text()
    assert (
        "a &lt;model&gt;" in page and "data:image/png" in page and (tmp_path / "out" / "heat-maps.png").stat().st_size
    )


@pytest.mark.ledger("long.ruler")
def test_a_model_is_measured_by_the_command(demo_run: Path, tmp_path: Path) -> None:
    options = ("--lengths", "100,200", "--depths", "0,1", "--count", 2, "--tasks", "needle,hops,count")
    result = json.loads(regard("eval", "long", demo_run, *options, "--json", "--out", tmp_path / "long").stdout)
    assert len(result["cells"]) == 2 * (2 + 2 + 1) and (tmp_path / "long" / "heat-maps.png").exists()
    printed = regard("eval", "long", demo_run, *options).stdout
    assert "effective length:" in printed and "needle" in printed and "any" in printed
    for wrong, message in {
        ("--tasks", "needle,pin"): "--tasks pin is not a task; choose from needle, several, hops, count",
        ("--depths", "0,2"): "--depths 2.0 is not between 0 and 1",
        ("--lengths", "many"): "is not a list of numbers",
        ("--lengths", "4096"): "use at most",
        ("--lengths", "5000,20"): "use at most",
        ("--lengths", "20,400"): "the question alone takes",
    }.items():
        assert message in str(regard("eval", "long", demo_run, *wrong, "--count", 1).exception)
