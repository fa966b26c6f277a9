"""The chunks with the highest BM25 for the words of a query, without scoring every chunk (Turtle & Flood 1995).

    BM25(chunk) = Σ_t idf(t) tf (k + 1) / (tf + k (1 - b + b length / mean length))  ≤  Σ_t idf(t) (k + 1)

FTS5 scores all chunks that have any word of the query, which are nearly all if one word is frequent. Here those with
the rarest word are scored; if the last result has a higher score than the other words alone can give, no other chunk
belongs to the results. Otherwise the next rarest words are added. Of a long query the MOST_WORDS rarest of the first
READ_WORDS words count.

Words of more than half of the chunks are left out if the query has others: their weight in FTS5 is 1e-6, and scoring
most chunks takes the longest. In an index of less than SMALL chunks all words count.
"""

import math
import sqlite3
from collections.abc import Mapping, Sequence

K = 1.2  # of FTS5, whose b is 0.75
LEAST_IDF = 1e-6  # that FTS5 gives to words of more than half of the chunks
READ_WORDS, MOST_WORDS = 1000, 64  # of a query
SMALL = 1000  # chunks
MOST_SCORED = 0.4  # of the chunks; of more of them, scoring all that match is faster
SCORES = (
    "SELECT rowid, -rank FROM words WHERE words MATCH ? AND rowid NOT IN "
    "(SELECT chunks.id FROM files CROSS JOIN chunks ON file = files.id WHERE NOT complete)"  # in this order
)


def best_by_words(
    database: sqlite3.Connection, words: Sequence[str], count: int, counts: dict[str, int] | None = None
) -> list[tuple[int, float]]:
    """(chunk, BM25) of at most `count` chunks, the highest first; of equal scores the first chunk.

    counts: the chunks with words of earlier queries of the same index; those of this query are added.
    """
    [chunks] = database.execute("SELECT count(*) FROM chunks").fetchone()
    counts = {} if counts is None else counts
    for word in words[:READ_WORDS]:
        if word not in counts:
            counts[word] = chunks_with(database, word, chunks // 2 + 1)
    found = {word: counts[word] for word in words[:READ_WORDS]}
    order = sorted((word for word in found if found[word]), key=lambda word: found[word])[:MOST_WORDS]
    if not order:
        return []
    if chunks >= SMALL and (rare := [word for word in order if found[word] <= chunks // 2]):
        return best_of(database, rare, found, chunks, count) or best_of(database, order, found, chunks, count)
    return best_of(database, order, found, chunks, count)


def best_of(
    database: sqlite3.Connection, order: Sequence[str], found: Mapping[str, int], chunks: int, count: int
) -> list[tuple[int, float]]:
    """order: the words that count, the rarest first. found: the chunks with each."""
    for size in (n for n in range(1, len(order)) if n <= 4 or n.bit_count() == 1):  # each is scored anew
        scored = sum(found[word] for word in order[:size])
        if scored > MOST_SCORED * chunks:
            break
        rest = sum(largest(found[word], chunks) for word in order[size:])
        likely = sum(idf(found[word], chunks) for word in order[:size])  # the score of a good chunk
        if scored >= count and likely > rest:
            best = highest(scores_of(database, order, size), count)
            if len(best) == count and best[-1][1] > rest:
                return best
    return database.execute(f"{SCORES} ORDER BY rank, rowid LIMIT ?", [either(order), count]).fetchall()


def scores_of(database: sqlite3.Connection, order: Sequence[str], size: int) -> dict[int, float]:
    """The BM25 for all words of the chunks that have one of the first `size`.

    The expression of FTS5 has these words twice, because a word cannot be optional, and so counts them twice.
    """
    rare = either(order[:size])
    twice = database.execute(SCORES, [f"({rare}) AND ({either(order)})"])
    once = dict(database.execute(SCORES, [rare]).fetchall())
    return {id: score - once[id] for id, score in twice}


def chunks_with(database: sqlite3.Connection, word: str, most: int) -> int:
    """The number of chunks that have a word; it is counted up to `most`."""
    counted = "SELECT count(*) FROM (SELECT 1 FROM words WHERE words MATCH ? LIMIT ?)"
    return database.execute(counted, [either([word]), most]).fetchone()[0]


def idf(found: int, chunks: int) -> float:
    """Of a word that so many of the chunks have."""
    ratio = (chunks - found + 0.5) / (found + 0.5)
    return math.log(ratio) if ratio > 1 else LEAST_IDF


def largest(found: int, chunks: int) -> float:
    """What such a word can add to a score."""
    return (K + 1) * idf(found, chunks)


def highest(scores: dict[int, float], count: int) -> list[tuple[int, float]]:
    return sorted(scores.items(), key=lambda pair: (-pair[1], pair[0]))[:count]


def either(words: Sequence[str]) -> str:
    return " OR ".join(f'"{word}"' for word in words)
