"""Recall and mean reciprocal rank of labelled questions, and answers compared with their labels."""

import json
import math
from pathlib import Path

import pytest

from regard.retrieval.chunks import DocumentChunk
from regard.retrieval.document_index import Hit
from regard.retrieval.quality import LabelledQuestion, SearchQuality, is_correct, read_questions
from regard.text.source_prompt import PromptSource


def hit(path: str, first: int, last: int) -> Hit:
    return Hit(0, path, "line", DocumentChunk("text", 0, first, last, ()))


def test_the_rank_of_the_first_chunk_that_covers_the_line() -> None:
    hits = [hit("/docs/b.md", 1, 9), hit("/docs/a.md", 1, 4), hit("/docs/a.md", 5, 9), hit("/docs/xa.md", 5, 9)]
    assert LabelledQuestion("?", "a.md", 5).rank(hits) == 3
    assert LabelledQuestion("?", "docs/a.md").rank(hits) == 2
    assert LabelledQuestion("?", "a.md", 10).rank(hits) is None
    assert LabelledQuestion("?", "other/a.md").rank(hits) is None
    source = PromptSource(1, "/docs/a.md", "line", 5, 9, (), 0, "text")
    assert LabelledQuestion("?", "a.md", 9).is_in(source) and not LabelledQuestion("?", "a.md", 4).is_in(source)


def test_recall_and_reciprocal_rank_by_hand() -> None:
    quality = SearchQuality.of([1, 2, None, 10, 6])
    assert quality.recall == {1: 0.2, 5: 0.4, 10: 0.8}
    reciprocal = [1, 1 / 2, 0, 1 / 10, 1 / 6]
    mean = sum(reciprocal) / 5
    assert quality.mrr == pytest.approx(mean)
    assert quality.error == pytest.approx(math.sqrt(sum((value - mean) ** 2 for value in reciprocal) / 4 / 5))
    assert SearchQuality.of([1]).error is None


def test_citations_case_and_a_period_do_not_matter() -> None:
    assert is_correct(" The cello [2].", "the cello") and is_correct("Anna Halden[1, 2]", "Anna Halden")
    assert not is_correct("the cello or the harp [1]", "the cello") and not is_correct("", "the cello")


def test_questions_are_read_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps({"question": "Who?", "path": "a.md", "line": 3, "more": 1}) + "\n\n")
    assert read_questions(path) == [LabelledQuestion("Who?", "a.md", 3)]
    path.write_text('{"question": "Who?", "path": "./b//a.md"}')
    assert read_questions(path)[0].is_about("/docs/b/a.md") and not read_questions(path)[0].is_about("/docs/cb/a.md")
    path.write_text('{"question": "Who?\u2028When?", "path": "a.md"}\r\n{"question": "Why?", "path": "b"}')
    assert [question.text for question in read_questions(path)] == ["Who?\u2028When?", "Why?"]
    for text, message in {
        "": "has no questions",
        "\n" + "[" * 100_000: "line 2: maximum recursion",
        "[1]": "line 1: this is no object",
        "{": "line 1: Expecting",
        '{"question": "Who?"}': "line 1: `path` is None",
        '{"question": "", "path": "a"}': "`question` is ''",
        '{"question": "Who?", "path": "a", "line": true}': "`line` is True",
        '{"question": "Who?", "path": "a", "line": 100000000000000000000}': "`line` is 1000",
        '{"question": " ", "path": "a"}': "line 1: `question` is ' '",
        '{"question": "\\ud800", "path": "a"}': "line 1: `question` is ",
    }.items():
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_questions(path)
