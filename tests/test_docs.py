"""The documentation works: its Python runs, its links have targets, every page is in the navigation."""

import re
import runpy
import tomllib
from pathlib import Path

import pytest

from regard.kinds import TABLES

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TOPICS = sorted((DOCS / "topics").glob("*.md"))
GUIDES = [DOCS / "start.md", *sorted((DOCS / "how-to").glob("*.md"))]


def name(path: Path) -> str:
    return str(path.relative_to(DOCS))


@pytest.mark.parametrize("page", [*TOPICS, *GUIDES], ids=name)
def test_examples_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """The examples of a page run in order and share their variables. The reader's run and text file exist."""
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks or page.name == "add-a-family.md", "a page needs an example"
    monkeypatch.chdir(tmp_path)
    if any('"runs/mine"' in block for block in blocks):
        Path("runs").mkdir()
        Path("runs/mine").symlink_to(request.getfixturevalue("demo_run"))
    Path("my.txt").write_text("Anna is in the barn.\n" * 2000, encoding="utf-8")
    scope: dict = {"__name__": "__main__"}
    for block in blocks:
        exec(compile(block, name(page), "exec"), scope)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_named_files_exist(page: Path) -> None:
    """Pages name files by their path from the root or from src/regard."""
    named_paths = re.findall(r"`([\w/]+/\w+\.py)`", page.read_text(encoding="utf-8"))
    assert named_paths or page not in TOPICS, "a topic must name the files of its parts"
    for path in named_paths:
        assert (ROOT / path).is_file() or (ROOT / "src" / "regard" / path).is_file(), path


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_have_targets(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_every_page_is_in_the_navigation() -> None:
    def pages(nav: object) -> list[str]:
        if isinstance(nav, str):
            return [nav]
        items = nav if isinstance(nav, list) else list(nav.values())  # type: ignore[union-attr]
        return [page for item in items for page in pages(item)]

    listed = pages(tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]["nav"])
    assert sorted(listed) == sorted(map(name, PAGES))


def test_the_api_reference_is_current() -> None:
    written = runpy.run_path(str(DOCS / "generate_api.py"))["page"]()
    assert (DOCS / "api.md").read_text(encoding="utf-8") == written, "run python docs/generate_api.py"
    assert "loss_t = -min(ρ_t A_t, clip(ρ_t) A_t)" in written  # of PPO, after the second paragraph of its module


def test_every_picture_is_shown() -> None:
    texts = [page.read_text(encoding="utf-8") for page in (ROOT / "README.md", *PAGES)]
    used_pictures = {found for text in texts for found in re.findall(r"pictures/([\w/-]+\.png)\)", text)}
    folder = DOCS / "pictures"
    assert used_pictures == {picture.relative_to(folder).as_posix() for picture in folder.rglob("*.png")}


@pytest.mark.slow
def test_pictures_can_be_drawn_again(tmp_path: Path) -> None:
    drawing = runpy.run_path(str(DOCS / "draw"))
    drawing["draw"](drawing["PICTURES"], tmp_path)
    for picture in tmp_path.iterdir():
        assert (DOCS / "pictures" / picture.name).is_file()
        assert picture.stat().st_size < 60_000, f"{picture.name} is larger than 60 kB"


def table_rows(page: str, heading: str) -> list[list[str]]:
    """The cells of the table whose first column has this heading."""
    _, _, table = (DOCS / page).read_text(encoding="utf-8").partition(f"| {heading} |")
    lines = table.partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.ledger("calc.reference")
def test_every_term_of_the_reference_has_a_formula_a_purpose_and_a_file() -> None:
    rows = table_rows("reference.md", "term")
    assert len(rows) == len({term for term, *_ in rows}) >= 17
    for term, formula, purpose, file in rows:
        assert formula and purpose, term
        assert (ROOT / "src" / "regard" / file.strip("`")).is_file(), term


@pytest.mark.ledger("calc.complexity")
def test_the_notation_of_papers_is_translated_into_letters_that_are_defined() -> None:
    letters = {letter.strip("`") for letter, *_ in table_rows("shapes.md", "letter")}
    translated = table_rows("shapes.md", "papers")
    notation = {symbol: letter for symbols, _, letter in translated for symbol in symbols.split(", ")}
    assert {"n", "d", "h", "L", "d_ff", "w", "r", "M"} <= notation.keys()
    assert all(set(re.findall(r"`([A-Z])`", letter)) <= letters for letter in notation.values())
    assert [re.findall(r"`([A-Z])`", notation[symbol]) for symbol in ("n", "d", "d_ff")] == [["L", "S"], ["D"], ["F"]]


def test_the_fields_of_examples_are_listed_for_every_objective() -> None:
    rows = table_rows("how-to/train.md", "objective")
    assert sorted(re.findall(r"\w+", " ".join(kinds for kinds, _ in rows))) == sorted(TABLES["objectives"])
