"""The ledger tells the truth: what is ticked is cited, what is cited is ticked, and the counts are right."""

from collections import Counter
from pathlib import Path

import pytest

from tests.ledger import KINDS, PAGE, citations, comments, contents, marks, read, tick

PAGE_TEXT = PAGE.read_text(encoding="utf-8")
ROWS = read(PAGE_TEXT)
CITED = citations()
REMEDY = "run `python -m tests.ledger --tick`"


def test_every_line_of_a_table_is_read() -> None:
    """A row that the parser passes over could neither be ticked nor missed."""
    assert len(ROWS) == sum(line.startswith(("| ☐", "| ☑")) for line in PAGE_TEXT.splitlines()) == 497


def test_ids_are_unique_and_kinds_are_known() -> None:
    assert [id for id, times in Counter(row.id for row in ROWS).items() if times > 1] == []
    assert {row.kind for row in ROWS} <= set(KINDS)


def test_every_cited_row_exists() -> None:
    unknown = {id: files for id, files in CITED.items() if id not in {row.id for row in ROWS}}
    assert not unknown, f"no such rows: {unknown}"


def test_what_is_ticked_is_cited_and_what_is_cited_is_ticked() -> None:
    ticked = {row.id for row in ROWS if row.ticked}
    assert ticked == set(CITED), f"{sorted(ticked ^ set(CITED))}: {REMEDY}"


def test_rows_name_the_files_that_show_them() -> None:
    wrong = {row.id: (row.shown_by, CITED.get(row.id, ())) for row in ROWS if row.shown_by != CITED.get(row.id, ())}
    assert not wrong, f"{wrong}: {REMEDY}"


def test_the_contents_are_counted() -> None:
    assert contents(ROWS) in PAGE_TEXT, REMEDY


def test_marks_are_found_wherever_pytest_takes_them() -> None:
    source = """
pytestmark = [pytest.mark.slow, pytest.mark.ledger("a.module")]

@pytest.mark.ledger("a.function", "another.one")
@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.ledger("a.parameter"))])
def test_it(n): ...
"""
    assert set(marks(source)) == {"a.module", "a.function", "another.one", "a.parameter"}
    with pytest.raises(ValueError, match=r"line 2: write the ids out"):
        list(marks("\n@pytest.mark.ledger(*IDS)\ndef test_it(): ..."))


def test_pages_and_labs_cite_in_comments() -> None:
    assert list(comments("<!-- ledger: pos.rope pos.t5 -->\ntext\n# ledger: pos.nope\n")) == [
        "pos.rope",
        "pos.t5",
        "pos.nope",
    ]


def test_ticking_follows_the_citations(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text('@pytest.mark.ledger("pos.rope")\ndef test_a(): ...')
    page = tick(PAGE_TEXT, citations(tmp_path))
    assert [(row.id, row.shown_by) for row in read(page) if row.ticked] == [("pos.rope", ("tests/test_a.py",))]
    assert tick(page, CITED) == tick(PAGE_TEXT, CITED)
    with pytest.raises(ValueError, match=r"test_b.py cites 'pos.rop', no row of the ledger; .*pos.rope"):
        tick(page, {"pos.rop": ("tests/test_b.py",)})
