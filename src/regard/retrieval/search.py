"""Search an index: by vectors, by words, or by both, whose rankings are fused.

    vectors    the cosine of the query's vector and those of all chunks, exactly
    words      BM25 of the words of the query
    hybrid     score(chunk) = Σ 1 / (60 + its rank) over both rankings          Cormack et al. 2009

Vectors find what means the same in other words, words find names and numbers that an encoder has not learned.
"""

from collections.abc import Callable, Sequence
from typing import Literal, get_args

from regard.retrieval.document_index import DocumentIndex, Hit, fuse
from regard.retrieval.update_index import Embed, embedded_text

SearchMethod = Literal["hybrid", "vectors", "words"]
CANDIDATES = 50  # of each ranking, before they are fused or reranked
Rerank = Callable[[str, Sequence[str]], Sequence[float]]  # query, texts -> a score per text


def search(
    index: DocumentIndex,
    query: str,
    embed: Embed,
    count: int = 5,
    method: SearchMethod = "hybrid",
    rerank: Rerank | None = None,
) -> list[Hit]:
    """The best chunks for a query, the best first. rerank: orders the candidates by reading them with the query."""
    if method not in get_args(SearchMethod):
        raise ValueError(f"method={method!r} must be one of {', '.join(get_args(SearchMethod))}")
    if not query.strip():
        raise ValueError("the query is empty; ask for something")
    candidates, rankings = max(count, CANDIDATES), []
    if method != "words":
        rankings.append([id for id, _ in index.nearest(embed([query])[0], candidates)])
    if method != "vectors":
        rankings.append([id for id, _ in index.matching(query, candidates)])
    hits = index.hits(fuse(rankings)[:candidates])
    if rerank is not None and hits:
        scores = rerank(query, [embedded_text(hit.chunk) for hit in hits])
        order = sorted(range(len(hits)), key=lambda i: -scores[i])  # of equal scores, the first stays first
        hits = [hits[i] for i in order]
    return hits[:count]
