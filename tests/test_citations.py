"""The papers that docs/topics/ancestors.md dates are cited, with the same year, by the files that implement them."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROWS = re.findall(
    r"^\| (\d{4}) \| .+ \| (.+) \| `(.+)` \|$", (ROOT / "docs/topics/ancestors.md").read_text(), re.MULTILINE
)


@pytest.mark.ledger("anc.dates")
@pytest.mark.parametrize(("year", "paper", "file"), ROWS, ids=lambda value: str(value))
def test_a_file_cites_the_paper_of_its_idea(year: str, paper: str, file: str) -> None:
    assert paper.endswith(year)
    assert paper in " ".join((ROOT / file).read_text().split())


def test_the_table_is_read() -> None:
    assert len(ROWS) == 13
