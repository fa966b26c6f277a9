"""The numbers of the figure of retrieval, as its instrument shows them."""

import numpy as np
import pytest

from regard.instruments.retrieval import WIDTHS, hashed_vectors
from regard.text.source_prompt import INSTRUCTIONS
from tests.instruments.test_figures import panel, shown

pytestmark = pytest.mark.ledger("fig.5.30")
ASKED = "When does the boat bring letters?"


def passages(**controls) -> list[dict]:
    table = panel("retrieval", "table", 1, **controls)
    return [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]


def test_the_two_best_passages_are_the_sources_of_the_prompt_and_of_the_answer() -> None:
    found, prompt = passages(), panel("retrieval", "table")["rows"]
    assert [role for role, _ in prompt if role] == ["system", "user"] and prompt[0][1] == INSTRUCTIONS
    assert prompt[-1][1] == f"Question: {ASKED}"
    lines = [line for _, line in prompt]
    sources = [line for line in lines if line.startswith("<source ")]
    assert [f'section="{row["section"]}"' in line for row, line in zip(found[:2], sources, strict=True)] == [True, True]
    assert all(set(row["text"].splitlines()) - {""} <= set(lines) for row in found[:2])
    assert not set(found[2]["text"].splitlines()) & set(lines)
    answer = panel("retrieval", "tokens", 1)
    assert " ".join(answer["pieces"]) == "The boat brings food and letters on Tuesdays. [1]"
    assert answer["notes"][-1] == "boat.md, lines 1 to 4" and not any(answer["notes"][:-1])
    assert shown("retrieval")["words of the prompt"] == sum(len(line.split()) for line in lines)


@pytest.mark.parametrize("width", range(len(WIDTHS)))
def test_similarities_are_those_of_the_vectors(width: int) -> None:
    dim = int(WIDTHS[width])
    vectors = hashed_vectors([ASKED, "", "the"], dim)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx([1, 0, 0], abs=1e-9), "every passage has “the”"
    drawn = panel("retrieval", "heatmap", width=width)["values"]
    assert drawn[0] == pytest.approx(vectors[0, :16].tolist(), abs=1e-6) and len(drawn) == 1 + 2
    for row in passages(width=width, method="vectors"):
        [text] = hashed_vectors([f"{row['section']}\n{row['text']}"], dim)
        assert row["cosine"] == row["score"] == pytest.approx(float(text @ vectors[0]), abs=1e-4)


def test_scores_of_each_search() -> None:
    for method in ("hybrid", "vectors", "words"):
        rows = passages(method=method)
        assert [row["score"] for row in rows] == sorted((row["score"] for row in rows), reverse=True)
        assert panel("retrieval", "bars", method=method)["values"] == [row["score"] for row in rows]
    rows = passages()
    cosine, bm25 = (max(row[name] for row in rows) for name in ("cosine", "BM25"))
    for row in rows:
        shares = max(row["cosine"], 0) / cosine, row["BM25"] / bm25
        assert row["score"] == pytest.approx(sum(shares) / 2, abs=3e-4)


def test_words_know_no_typos_and_letters_no_synonyms() -> None:
    typo = {"question": "vistors climing towr"}
    assert shown("retrieval", method="words", **typo)["sources in the prompt"] == 0
    assert panel("retrieval", "tokens", 1, method="words", **typo)["pieces"][:3] == ["The", "sources", "do"]
    assert passages(method="vectors", **typo)[0]["section"] == "The house > Visitors"
    synonym = {"question": "What happens without electricity?"}
    assert passages(**synonym)[0]["section"] != "The light > Power"


def test_passages_and_sources_keep_their_limits() -> None:
    short = passages(words=10)
    assert len(short) > len(passages()) and all(len(row["text"].split()) <= 10 for row in short)
    assert (
        shown("retrieval", budget=20)["sources in the prompt"] < shown("retrieval", budget=100)["sources in the prompt"]
    )
    assert shown("retrieval", count=7, budget=200)["passages found"] == "7 of 7"
    with pytest.raises(ValueError, match="the query is empty"):
        panel("retrieval", "bars", question="  ")
