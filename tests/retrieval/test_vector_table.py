"""Vectors in a table: compared exactly, or by cells, whose recall is measured against the exact search."""

import sqlite3
from pathlib import Path

import numpy as np
import pytest

from regard.retrieval import vector_table
from regard.retrieval.cells import learn_centres, nearest_centres
from regard.retrieval.chunks import DocumentChunk
from regard.retrieval.document_index import DocumentIndex, IndexSettings
from regard.retrieval.vector_table import CELL, VectorTable, cells_for, stack

DIM = 16


def clustered(count: int, seed: int, groups: int = 40) -> np.ndarray:
    """Unit vectors around some directions, as embeddings are."""
    centres = np.random.default_rng(0).normal(size=(groups, DIM))
    rng = np.random.default_rng(seed)
    vectors = centres[rng.integers(groups, size=count)] + 0.5 * rng.normal(size=(count, DIM))
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def index_of(path: Path, vectors: np.ndarray, many: int = 1000) -> DocumentIndex:
    index = DocumentIndex(path, IndexSettings("model", "0", DIM, 100, 0))
    index.vectors.many = many
    store(index, vectors, "a.md")
    return index


def store(index: DocumentIndex, vectors: np.ndarray, path: str) -> None:
    file, _ = index.begin(path, 0, 0, b"", "line")
    index.add(file, [DocumentChunk("text", i, i, i, ()) for i in range(len(vectors))], vectors)
    index.finish(file)


def exact(index: DocumentIndex, query: np.ndarray, count: int) -> list[int]:
    chunks, vectors = stack(index.database.execute("SELECT chunk, vector FROM vectors ORDER BY chunk"), DIM)
    return chunks[np.lexsort((chunks, -(vectors @ query.astype(np.float32))))][:count].tolist()


def test_few_vectors_are_compared_exactly(tmp_path: Path) -> None:
    index = index_of(tmp_path / "index", clustered(300, 1))
    index.build_cells()
    assert not len(index.vectors.read_centres())
    for query in clustered(20, 2):
        assert [id for id, _ in index.vectors.nearest(query, 7)] == exact(index, query, 7)


def test_many_vectors_are_found_by_their_cells(tmp_path: Path) -> None:
    index = index_of(tmp_path / "index", clustered(4000, 1))
    index.build_cells()
    assert len(index.vectors.read_centres()) == cells_for(4000) == 63
    rows = index.database.execute("SELECT id / ?, count(*) FROM vectors GROUP BY 1", [CELL]).fetchall()
    assert sum(count for _, count in rows) == 4000 and 0 not in dict(rows) and len(rows) > 50
    found = compared = 0
    for query in clustered(50, 2):
        best = index.vectors.nearest(query, 10)
        compared += len(index.vectors.candidates(query)[0])
        found += len({id for id, _ in best} & {*exact(index, query, 10)})
        assert index.vectors.cosines(query, [id for id, _ in best]) == pytest.approx([cosine for _, cosine in best])
    assert found / 500 > 0.99 and compared / 50 < 0.7 * 4000


def test_all_cells_are_the_exact_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = index_of(tmp_path / "index", clustered(2000, 1))
    index.build_cells()
    monkeypatch.setattr(vector_table, "PROBES", 10**6)
    for query in clustered(10, 2):
        assert [id for id, _ in index.vectors.nearest(query, 9)] == exact(index, query, 9)


def test_added_and_removed_vectors_follow_the_cells(tmp_path: Path) -> None:
    index = index_of(tmp_path / "index", clustered(2000, 1))
    index.build_cells()
    centres = index.vectors.read_centres()
    new = clustered(100, 3)
    store(index, new, "b.md")
    for i, vector in enumerate(new):
        best, cosine = index.vectors.nearest(vector, 1)[0]
        assert best == 2001 + i and cosine == pytest.approx(1)
    assert not index.vectors.needs_cells()
    index.remove("b.md")
    assert index.vectors.count() == 2000 and index.vectors.nearest(new[0], 1)[0][0] <= 2000
    store(index, clustered(2500, 4), "c.md")  # more than twice as many
    index.build_cells()
    assert len(index.vectors.read_centres()) == cells_for(4500) > len(centres)
    index.check()


def test_files_that_are_not_complete_are_not_found(tmp_path: Path) -> None:
    index = index_of(tmp_path / "index", clustered(2000, 1))
    index.build_cells()
    vector = clustered(1, 9)
    file, _ = index.begin("b.md", 0, 0, b"", "line")
    index.add(file, [DocumentChunk("text", 0, 0, 0, ())], vector)
    assert index.vectors.nearest(vector[0], 1)[0][0] != 2001
    index.finish(file)
    assert index.vectors.nearest(vector[0], 1)[0][0] == 2001


def test_an_interrupted_division_leaves_the_index_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = index_of(tmp_path / "index", clustered(2000, 1))
    calls = iter([True, False])

    def interrupted(vectors: np.ndarray, centres: np.ndarray) -> np.ndarray:
        if next(calls):
            return nearest_centres(vectors, centres)
        raise KeyboardInterrupt

    monkeypatch.setattr(vector_table, "READ", 500)
    monkeypatch.setattr(vector_table, "nearest_centres", interrupted)
    with pytest.raises(KeyboardInterrupt):
        index.build_cells()
    assert index.vectors.needs_cells() and not len(index.vectors.read_centres())
    query = clustered(1, 2)[0]
    assert [id for id, _ in index.vectors.nearest(query, 5)] == exact(index, query, 5)


def test_centres_are_those_of_separate_groups() -> None:
    rng = np.random.default_rng(0)
    groups = np.eye(DIM)[:4]
    vectors = np.repeat(groups, 50, 0) + 0.01 * rng.normal(size=(200, DIM))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    found = [learn_centres(vectors, 4, seed) for seed in range(10)]
    best = max(found, key=lambda centres: (vectors @ centres.T).max(1).mean())
    assert np.allclose(np.linalg.norm(best, axis=1), 1)
    assert sorted(np.argmax(best, axis=1)) == [0, 1, 2, 3] and (vectors @ best.T).max(1).min() > 0.99
    cells = nearest_centres(vectors, best)
    assert all(len(set(cells[i : i + 50])) == 1 for i in range(0, 200, 50))


def test_equal_vectors_leave_cells_empty_without_nan() -> None:
    vectors = np.tile(np.eye(DIM)[:1], (50, 1))
    assert np.isfinite(learn_centres(vectors, 8)).all()


def test_wrong_vectors_are_refused() -> None:
    table = VectorTable(sqlite3.connect(":memory:"), DIM)
    with pytest.raises(ValueError, match=r"the shape \(2, 3\), not \(1, 16\)"):
        table.add([1], np.zeros((2, 3)))
    with pytest.raises(ValueError, match="not finite"):
        table.add([1], np.full((1, DIM), np.nan))


def test_a_chunk_that_was_removed_meanwhile_has_no_cosine(tmp_path: Path) -> None:
    vectors = clustered(3, 1)
    index = index_of(tmp_path / "index", vectors)
    first, *_ = (id for id, _ in index.vectors.nearest(vectors[0], 1))
    assert index.vectors.cosines(vectors[0], [first, 99]) == [pytest.approx(1), 0.0]
