"""Search by words, by vectors and by both; reranking; and the worked example of four vectors."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from regard.retrieval.chunks import DocumentChunk
from regard.retrieval.document_index import DocumentIndex, IndexSettings
from regard.retrieval.search import hybrid, search
from regard.retrieval.sources import choose_sources
from regard.retrieval.update_index import update_index
from regard.text.source_prompt import question_messages
from tests.retrieval.test_chunks import word_starts
from tests.retrieval.test_document_index import SETTINGS, embed, write


@pytest.fixture
def index(tmp_path: Path) -> DocumentIndex:
    write(
        tmp_path / "docs",
        barn="Anna is in the barn. She feeds the horse.",
        river="Ben swims in the river. The water is cold.",
        garden="# Plants\n\nThe garden has roses, and behind it stands a barn.",
        serial="The number of the pump is QX-1187.",
    )
    opened = DocumentIndex(tmp_path / "index.db", SETTINGS)
    update_index(opened, [tmp_path / "docs"], word_starts, embed)
    return opened


def names(index: DocumentIndex, query: str, count: int = 4, **options) -> list[str]:
    return [Path(hit.path).stem for hit in search(index, query, embed, count, **options)]


@pytest.mark.ledger("rag.embed")
def test_the_nearest_vectors_are_found(index: DocumentIndex) -> None:
    assert names(index, "Anna is in the barn. She feeds the horse.", method="vectors")[0] == "barn"
    assert len(names(index, "nothing of all this", method="vectors")) == 4  # the nearest, however far
    assert names(index, "barn", 2, method="vectors") == names(index, "barn", method="vectors")[:2]


def test_words_find_what_vectors_do_not_know(index: DocumentIndex) -> None:
    assert names(index, "qx 1187", method="words") == ["serial"]
    assert names(index, "plants", method="words") == ["garden"]  # in the title of its section
    assert names(index, "elephants", method="words") == []


def test_hybrid_search_adds_the_shares_of_the_largest_scores(index: DocumentIndex) -> None:
    for query in ("barn", "cold water in a barn", "qx 1187"):
        cosines = dict(index.vectors.nearest(embed([query])[0], 50))
        bm25 = dict(index.matching(query, 50))
        scores = {
            id: max(cosine, 0) / max(cosines.values()) + bm25.get(id, 0) / max(bm25.values())
            for id, cosine in cosines.items()
        }
        expected = sorted(scores, key=lambda id: (-scores[id], id))
        hits = search(index, query, embed, 3)
        assert [hit.id for hit in hits] == expected[:3]
        assert [hit.score for hit in hits] == pytest.approx([scores[id] / 2 for id in expected[:3]])
    assert names(index, "elephants", 4) == names(index, "elephants", 4, method="vectors")  # no word is known


def test_the_mean_of_shares_by_hand(index: DocumentIndex) -> None:
    ids, vectors = index.vectors.all_vectors()
    vector = vectors[0] / np.linalg.norm(vectors[0])
    first, second, third = (int(id) for id in ids[:3])
    found = hybrid(index, vector, [first], {second: 8.0, third: 2.0})
    cosines = index.vectors.cosines(vector, [first, second, third])
    assert cosines[0] == pytest.approx(1) and np.allclose(cosines, vectors[:3] @ vector)
    shares = [1.0, max(cosines[1], 0) + 1, max(cosines[2], 0) + 0.25]
    expected = sorted(zip(shares, (first, second, third), strict=True), reverse=True)
    assert [id for id, _ in found] == [id for _, id in expected]
    assert [score for _, score in found] == pytest.approx([share / 2 for share, _ in expected])


def test_candidates_are_reranked(index: DocumentIndex) -> None:
    read: list[str] = []

    def shortest(query: str, texts: Sequence[str]) -> list[float]:
        assert query == "barn"
        read.extend(texts)
        return [-len(text) for text in texts]

    assert names(index, "barn", 1, rerank=shortest) == ["serial"]
    assert len(read) == 4 and any(text.startswith("Plants\n") for text in read)  # with the titles of its section
    found, first = names(index, "barn"), names(index, "barn")[:2]
    read.clear()
    assert names(index, "barn", rerank=shortest, reranked=2)[2:] == found[2:] and len(read) == 2
    assert set(names(index, "barn", rerank=shortest, reranked=2)[:2]) == set(first)
    assert names(index, "elephants", method="words", rerank=shortest) == []


def test_wrong_arguments_are_refused(index: DocumentIndex) -> None:
    with pytest.raises(ValueError, match="method='both' must be one of hybrid, vectors, words"):
        names(index, "barn", method="both")
    with pytest.raises(ValueError, match="the query is empty"):
        names(index, "  \n")


@pytest.mark.ledger("rag.fig")
def test_the_two_nearest_of_five_vectors_enter_the_prompt(tmp_path: Path) -> None:
    """Documents with given cosines to a query in four dimensions."""
    query, cosines = np.array([0.9, 0.2, 0.1, 0.3]), np.array([1.0, 0.98, 0.46, 0.38, 0.44])
    query /= np.linalg.norm(query)
    others = np.random.default_rng(0).standard_normal((5, 4))
    others -= np.outer(others @ query, query)  # orthogonal to the query
    others /= np.linalg.norm(others, axis=1, keepdims=True)
    vectors = np.outer(cosines, query) + np.sqrt(1 - cosines**2)[:, None] * others
    index = DocumentIndex(tmp_path / "index.db", IndexSettings("by hand", "", 4, 32, 8))
    id, _ = index.begin("documents", 1, 1, b"", "line")
    index.add(id, [DocumentChunk(f"text {i}", 100 * i, i, i, ()) for i in range(1, 6)], vectors)
    index.finish(id)
    found = index.vectors.nearest(query, 5)
    assert [hit.chunk.text for hit in index.hits([id for id, _ in found])] == [f"text {i}" for i in (1, 2, 3, 5, 4)]
    assert [round(score, 6) for _, score in found] == [1.0, 0.98, 0.46, 0.44, 0.38]
    hits = search(index, "a query", lambda texts: query[None], 2, "vectors")
    sources = choose_sources(hits, lambda text: len(text.split()), 100)
    prompt = question_messages("What?", sources)[1]["content"]
    assert "text 1" in prompt and "text 2" in prompt and "text 3" not in prompt
