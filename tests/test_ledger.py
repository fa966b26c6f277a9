"""The ledger's ticks follow from citations that suffice for the kind of row, and its counts are right."""

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.ledger import (
    KINDS,
    PAGE,
    Citation,
    citations,
    comments,
    contents,
    files_that_show,
    has_several_seeds,
    insufficient,
    marks,
    read,
    suffices,
    tick,
)

PAGE_TEXT = PAGE.read_text(encoding="utf-8")
ROWS = read(PAGE_TEXT)
REMEDY = "run `python -m tests.ledger --tick`"


@pytest.fixture(scope="module")
def cited() -> dict[str, tuple[Citation, ...]]:
    return citations()  # not on import: it parses all tests


def test_every_line_of_a_table_is_read() -> None:
    """A row that the parser skips would never be ticked or reported."""
    assert len(ROWS) == sum(line.startswith(("| ☐", "| ☑")) for line in PAGE_TEXT.splitlines()) == 497


def test_ids_are_unique_and_kinds_are_known() -> None:
    assert [id for id, times in Counter(row.id for row in ROWS).items() if times > 1] == []
    assert {row.kind for row in ROWS} <= set(KINDS)


def test_every_cited_row_exists(cited: dict[str, tuple[Citation, ...]]) -> None:
    unknown = {id: files for id, files in cited.items() if id not in {row.id for row in ROWS}}
    assert not unknown, f"no such rows: {unknown}"


def test_rows_are_ticked_and_name_their_files_if_and_only_if_the_citations_suffice(
    cited: dict[str, tuple[Citation, ...]],
) -> None:
    expected = {row.id: files_that_show(row, cited) for row in ROWS}
    wrong = {row.id: (row.shown_by, expected[row.id]) for row in ROWS if row.shown_by != expected[row.id]}
    assert not wrong, f"{wrong}: {REMEDY}"
    assert [row.id for row in ROWS if row.ticked != bool(expected[row.id])] == [], REMEDY


def test_only_claims_are_cited_without_being_shown(cited: dict[str, tuple[Citation, ...]]) -> None:
    """A claim may wait for more seeds. Any other row that is cited needs a sufficient citation at once."""
    kinds = {row.id: row.kind for row in ROWS}
    assert [line for line in insufficient(ROWS, cited) if kinds[line.partition(":")[0]] != "C"] == []


@pytest.mark.parametrize(
    ("kind", "evidence", "sufficient"),
    [
        ("C", "lab", True),
        ("C", "exact test", True),
        ("C", "lab without results for several seeds", False),
        ("C", "test", False),
        ("C", "GPU test", False),
        ("C", "page", False),
        *((kind, "test", True) for kind in "MENSF"),
        *((kind, "GPU test", False) for kind in "MENSF"),
        *((kind, "lab", False) for kind in "MENSF"),
        *((kind, "page", kind in "SF") for kind in "MENSF"),
    ],
)
def test_each_kind_of_row_needs_its_evidence(kind, evidence, sufficient) -> None:
    assert suffices(kind, [Citation("a", evidence)]) == sufficient
    assert suffices(kind, [Citation("a", "GPU test"), Citation("b", evidence)]) == sufficient


def test_a_lab_shows_a_claim_with_results_of_several_seeds(tmp_path: Path) -> None:
    results = tmp_path / "lab.json"
    assert not has_several_seeds(results)
    for seeds, size, sufficient in (([0, 1, 2], "full", True), ([0, 1], "full", False), ([0, 1, 2], "quick", False)):
        results.write_text(json.dumps({"seeds": seeds, "settings": {"size": size}}))
        assert has_several_seeds(results) == sufficient


def test_the_table_of_contents_is_current() -> None:
    assert contents(ROWS) in PAGE_TEXT, REMEDY


def test_marks_are_found_wherever_pytest_accepts_them() -> None:
    source = """
pytestmark = [pytest.mark.slow, pytest.mark.ledger("a.module")]

@pytest.mark.ledger("a.function", "another.one")
@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.ledger("a.parameter"))])
def test_it(n): ...

@pytest.mark.ledger("a.claim", exact=True)
def test_exactly(): ...

@pytest.mark.gpu
@pytest.mark.ledger("on.gpu")
def test_there(): ...
"""
    tests = ("a.module", "a.function", "another.one", "a.parameter")
    expected = dict.fromkeys(tests, "test") | {"a.claim": "exact test", "on.gpu": "GPU test"}
    assert dict(marks(source)) == expected
    for whole_file in ("pytestmark = pytest.mark.gpu", "pytestmark = [pytest.mark.slow, pytest.mark.gpu]"):
        assert dict(marks(whole_file + source.replace("pytestmark", "\nmore"))) == dict.fromkeys(expected, "GPU test")
    with pytest.raises(ValueError, match=r"line 2: write the ids out"):
        list(marks("\n@pytest.mark.ledger(*IDS)\ndef test_it(): ..."))


def test_pages_and_labs_cite_in_comments() -> None:
    assert list(comments("<!-- ledger: pos.rope pos.t5 -->\ntext\n# ledger: pos.nope\n")) == [
        "pos.rope",
        "pos.t5",
        "pos.nope",
    ]


def test_ticking_follows_the_citations(tmp_path: Path, cited: dict[str, tuple[Citation, ...]]) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text('@pytest.mark.ledger("pos.rope")\ndef test_a(): ...')
    (tmp_path / "src/regard/labs").mkdir(parents=True)
    (tmp_path / "src/regard/labs/some_lab.py").write_text("# ledger: ssm.recall")
    page = tick(PAGE_TEXT, citations(tmp_path))
    assert [(row.id, row.shown_by) for row in read(page) if row.ticked] == [("pos.rope", ("tests/test_a.py",))]
    (tmp_path / "docs/labs").mkdir(parents=True)
    (tmp_path / "docs/labs/some-lab.json").write_text('{"seeds": [0, 1, 2], "settings": {"size": "full"}}')
    page = tick(PAGE_TEXT, citations(tmp_path))
    assert [row.id for row in read(page) if row.ticked] == ["pos.rope", "ssm.recall"]
    assert tick(page, cited) == tick(PAGE_TEXT, cited)
    with pytest.raises(ValueError, match=r"test_b.py cites 'pos.rop', which is no row of the ledger; .*pos.rope"):
        tick(page, {"pos.rop": (Citation("tests/test_b.py", "test"),)})
