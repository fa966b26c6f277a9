"""Every pair of features of different axes equals its reference or is refused by name; random crossings do too."""

import random
from pathlib import Path

import pytest

from regard.engine.engine import Engine
from regard.engine.speculation.draft_length import DraftCosts
from tests.crossings import (
    CACHED,
    CHOOSING,
    REFUSED,
    TOLERANCE,
    Cell,
    built,
    covering_cells,
    difference,
    excluded,
    pair_cell,
    random_cell,
    run,
    table,
)

CELLS = covering_cells()


@pytest.fixture(autouse=True)
def free_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are always as long as possible, however many are rejected."""
    monkeypatch.setattr("regard.engine.speculation.speculation.COSTS", {"cpu": DraftCosts(1.0, 0.0)})


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: ", ".join(cell.values()))
def test_every_pair_of_features_equals_its_reference(cell: Cell) -> None:
    assert difference(cell) <= TOLERANCE


@pytest.mark.parametrize("pair", REFUSED, ids=lambda pair: f"{pair[1]}, {pair[3]}")
def test_a_pair_is_refused_by_name(pair: tuple[str, str, str, str]) -> None:
    with pytest.raises(ValueError) as refused:
        run(pair_cell(pair))
    assert all(name in str(refused.value) for name in REFUSED[pair]), refused.value


@pytest.mark.parametrize("cache", CACHED)
def test_engine_options_refuse_caches_by_name(cache: str) -> None:
    refusing = ("compile", "batch_invariant") if cache in CHOOSING else ("batch_invariant",)
    for option in refusing:
        with pytest.raises(ValueError, match=option) as refused:
            Engine(built("grouped"), rows=1, cache=cache, **{option: True})
        assert cache in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(120))
def test_random_crossings_equal_their_reference_or_are_refused(seed: int) -> None:
    """An error is raised only for a pair of the table."""
    cell = random_cell(random.Random(seed))
    if not (found := excluded(cell)):
        assert difference(cell) <= TOLERANCE, cell
    elif any(pair in REFUSED for pair in found):
        with pytest.raises(ValueError):
            run(cell)


def test_the_matrix_is_in_the_documentation() -> None:
    page = Path(__file__).parents[1] / "docs" / "topics" / "verify.md"
    assert table() in page.read_text(encoding="utf-8"), table()
