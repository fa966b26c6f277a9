"""The search by words equals a search that scores all chunks."""

import random

import pytest

from regard.retrieval import word_search
from regard.retrieval.chunks import DocumentChunk
from regard.retrieval.document_index import DocumentIndex
from regard.retrieval.update_index import update_index
from regard.retrieval.word_search import SCORES, best_by_words, either
from tests.retrieval.test_chunks import word_starts
from tests.retrieval.test_document_index import SETTINGS, embed

COMMON, RARE = ["the", "a", "of", "to", "and"], [f"name{i}" for i in range(40)]


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> DocumentIndex:
    """300 chunks of common words, with a rare one now and then."""
    folder = tmp_path_factory.mktemp("words")
    rng = random.Random(0)
    for number in range(300):
        words = rng.choices(COMMON, [8, 4, 2, 1, 1], k=rng.randint(4, 20)) + rng.choices(RARE, k=rng.randint(0, 2))
        rng.shuffle(words)
        (folder / f"{number}.txt").write_text(" ".join(words))
    index = DocumentIndex(folder / "index.db", SETTINGS)
    update_index(index, [folder], word_starts, embed)
    return index


def all_scored(index: DocumentIndex, words: list[str], count: int) -> list[tuple[int, float]]:
    rows = index.database.execute(f"{SCORES} ORDER BY rank, rowid", [either(words)]).fetchall()
    return rows[:count]


def test_it_equals_a_search_that_scores_all_chunks(index: DocumentIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    scored = []
    monkeypatch.setattr(
        word_search, "scores_of", lambda *given, scores=word_search.scores_of: scored.append(given) or scores(*given)
    )
    rng, short = random.Random(1), 0
    for _ in range(200):
        words = list(dict.fromkeys(rng.sample(COMMON, rng.randint(1, 4)) + rng.sample(RARE, rng.randint(0, 3))))
        count, before = rng.randint(1, 12), len(scored)
        found, expected = best_by_words(index.database, words, count), all_scored(index, words, count)
        assert [score for _, score in found] == pytest.approx([score for _, score in expected], rel=1e-9)
        assert [id for id, _ in found] == [id for id, _ in expected]
        short += len(scored) > before
    assert short > 50  # searches that did not score all chunks at first


def test_words_that_occur_nowhere_or_everywhere(index: DocumentIndex) -> None:
    assert best_by_words(index.database, ["absent"], 5) == []
    assert best_by_words(index.database, ["the", "absent"], 5) == all_scored(index, ["the", "absent"], 5)
    assert len(best_by_words(index.database, [*COMMON, RARE[0]], 1000)) == len(all_scored(index, COMMON, 1000))


def test_words_of_most_chunks_count_only_alone_or_in_a_small_index(
    index: DocumentIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = best_by_words(index.database, ["the", RARE[0]], 300)
    monkeypatch.setattr(word_search, "SMALL", 300)  # the chunks of the index
    large = best_by_words(index.database, ["the", RARE[0]], 300)
    assert large == all_scored(index, [RARE[0]], 300) and len(large) < len(small)
    assert dict(small) == pytest.approx(dict(small) | dict(large), rel=1e-4)
    assert best_by_words(index.database, ["the", "absent"], 5) == all_scored(index, ["the"], 5)
    file = index.begin("half.txt", 1, 0, b"", "line")[0]  # a rare word that only an incomplete file has
    index.add(file, [DocumentChunk("the zebra", 0, 1, 1, ())], embed(["the zebra"]))
    assert best_by_words(index.database, ["the", "zebra"], 5) == all_scored(index, ["the", "zebra"], 5) != []
    index.remove("half.txt")


def test_the_rarest_words_of_a_long_query_count(index: DocumentIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*COMMON, *RARE, *(f"absent{i}" for i in range(3000))]
    assert dict(best_by_words(index.database, words, 300)) == pytest.approx(
        dict(all_scored(index, [*COMMON, *RARE], 300))
    )
    assert best_by_words(index.database, [*words[len(COMMON) + len(RARE) :], *words], 300) == []  # not read so far
    monkeypatch.setattr(word_search, "MOST_WORDS", len(RARE))
    assert dict(best_by_words(index.database, words, 300)) == pytest.approx(dict(all_scored(index, RARE, 300)))
