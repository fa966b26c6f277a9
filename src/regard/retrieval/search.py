"""Search an index: by vectors, by words, or by both.

    vectors    the cosine of the query's vector and those of the chunks (vector_table.py)
    words      BM25 of the words of the query
    hybrid     ½ cosine / largest cosine + ½ BM25 / largest BM25                Bruch et al. 2022

Vectors find what means the same in other words, words find names and numbers that an encoder has not learned. Fusing
the scores keeps how much better the first result is than the second; fusing ranks would lose it.
"""

from collections.abc import Callable, Sequence
from typing import Literal, get_args

import numpy as np

from regard.retrieval.document_index import DocumentIndex, Hit
from regard.retrieval.update_index import Embed, embedded_text

SearchMethod = Literal["hybrid", "vectors", "words"]
CANDIDATES = 50  # of each ranking, before they are fused
RERANKED = 20  # a cross-encoder reads each of them
Rerank = Callable[[str, Sequence[str]], Sequence[float]]  # query, texts -> a score per text


def search(
    index: DocumentIndex,
    query: str,
    embed: Embed | None,
    count: int = 5,
    method: SearchMethod = "hybrid",
    rerank: Rerank | None = None,
    reranked: int = RERANKED,
) -> list[Hit]:
    """The best chunks for a query, the best first. embed: None if the method is `words`. rerank: orders the first
    `reranked` by reading them with the query; those after them follow in their order."""
    if method not in get_args(SearchMethod):
        raise ValueError(f"method={method!r} must be one of {', '.join(get_args(SearchMethod))}")
    if not query.strip():
        raise ValueError("the query is empty; ask for something")
    candidates = max(count, CANDIDATES, reranked)
    with index.reporting_damage():
        if method == "words":
            best = index.matching(query, candidates)
        else:
            assert embed is not None, f"a search by {method} needs embed"
            vector = embed([query])[0]
            best = index.vectors.nearest(vector, candidates)
            if method == "hybrid":
                nearest = [id for id, _ in best]
                best = hybrid(index, vector, nearest, dict(index.matching(query, candidates)))[:candidates]
        scored = dict(best)
        hits = [hit._replace(score=scored[hit.id]) for hit in index.hits(list(scored))]
    if rerank is not None and hits:
        scores = rerank(query, [embedded_text(hit.chunk) for hit in hits[:reranked]])
        order = sorted(range(len(scores)), key=lambda i: -scores[i])  # of equal scores, the first stays first
        hits = [*(hits[i]._replace(score=float(scores[i])) for i in order), *hits[reranked:]]
    return hits[:count]


def hybrid(
    index: DocumentIndex, vector: np.ndarray, nearest: Sequence[int], bm25: dict[int, float]
) -> list[tuple[int, float]]:
    """(chunk, score) of the chunks of both rankings, the highest score first."""
    scores = hybrid_scores(index, vector, nearest, bm25)
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))


def hybrid_scores(
    index: DocumentIndex, vector: np.ndarray, nearest: Sequence[int], bm25: dict[int, float]
) -> dict[int, float]:
    """The mean of both scores of each chunk, each as a share of the largest."""
    ids = sorted({*nearest, *bm25})
    by_vectors = shares(index.vectors.cosines(vector, ids))
    by_words = shares([bm25.get(id, 0.0) for id in ids])
    return {id: (a + b) / 2 for id, a, b in zip(ids, by_vectors, by_words, strict=True)}


def shares(scores: Sequence[float]) -> list[float]:
    """Of the largest score; all 0 if none is positive."""
    largest = max(scores, default=0.0)
    return [max(score, 0.0) / largest if largest > 0 else 0.0 for score in scores]
