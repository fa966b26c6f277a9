"""Chunks cover a document, keep their limits, and lead back to its lines."""

import random
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.retrieval.chunks import BLANK_LINE, HEADING, SENTENCE, SPACE, WITHIN_WORD, chunk_document, cut_strengths
from regard.retrieval.documents import ParsedDocument, parse_document

PAGE = """# The house

Anna is in the barn. She has the (red) ball.
Ben is here!

## The garden

The garden is behind the house. 花が咲く。鳥が鳴く。 Nobody is there.
"""


def word_starts(text: str) -> list[int]:
    """Tokens that are words, each with the space before it, as of a byte-level tokenizer."""
    return [match.start() for match in re.finditer(r" ?[^\s]+|\s+", text)]


def character_starts(text: str) -> list[int]:
    return list(range(len(text)))


def document(text: str, suffix: str = ".md") -> ParsedDocument:
    return parse_document(text.encode(), suffix, "test")


@settings(max_examples=60)
@given(
    st.lists(
        st.sampled_from(["Anna", "is", "here.", "\n", "\n\n", " ", "# A title\n", "a-very-long-word" * 3, "。", "  "]),
        max_size=80,
    ),
    st.integers(1, 30), st.integers(0, 29), st.booleans(), st.sampled_from([".md", ".txt"]),
)  # fmt: skip
def test_chunks_cover_the_document(parts: list[str], limit: int, overlap: int, by_word: bool, suffix: str) -> None:
    text = " ".join(parts)
    overlap, starts = min(overlap, limit - 1), (word_starts if by_word else character_starts)(text)
    found, covered = document(text, suffix), 0
    for chunk in chunk_document(found, starts, limit, overlap):
        end = chunk.start + len(chunk.text)
        assert text[chunk.start : end] == chunk.text == chunk.text.strip()
        assert not text[covered : chunk.start].strip(), "nothing is left out"
        assert sum(chunk.start <= start < end for start in starts) <= limit
        assert sum(chunk.start <= start < min(covered, end) for start in starts) <= overlap
        assert end > covered, "every chunk has something new"
        assert chunk.first == text[: chunk.start].count("\n") + 1 and chunk.last == text[:end].count("\n") + 1
        covered = end
    assert not text[covered:].strip()


def test_cuts_follow_the_structure() -> None:
    strengths, starts = cut_strengths(document(PAGE), word_starts(PAGE)), word_starts(PAGE)
    of = {PAGE[a:b].strip(): s for a, b, s in zip(starts, [*starts[1:], None], strengths, strict=True)}
    assert of["She"] == of["Ben"] == of["Nobody"] == SENTENCE and of["is"] == of["(red)"] == SPACE
    assert of["Anna"] == of["The"] == BLANK_LINE and of["##"] == HEADING
    letters = cut_strengths(document(PAGE), character_starts(PAGE))
    assert letters[PAGE.index("鳥")] == SENTENCE and letters[PAGE.index("nna")] == WITHIN_WORD


def test_a_chunk_ends_before_a_heading_and_knows_its_section() -> None:
    garden = PAGE.index("## The garden")
    chunks = list(chunk_document(document(PAGE), word_starts(PAGE), limit=60, overlap=8))
    assert [chunk.start for chunk in chunks] == [0, garden]
    assert [chunk.section for chunk in chunks] == [("The house",), ("The house", "The garden")]
    assert [(chunk.first, chunk.last) for chunk in chunks] == [(1, 4), (6, 8)]


def test_overlaps_begin_with_a_sentence() -> None:
    sentences = [f"Sentence {i} has words." for i in range(40)]
    text = " ".join(sentences)
    chunks = list(chunk_document(document(text, ".txt"), word_starts(text), limit=22, overlap=9))
    assert all(chunk.text.startswith("Sentence") and chunk.text.endswith("words.") for chunk in chunks)
    for chunk, following in zip(chunks, chunks[1:], strict=False):
        assert chunk.text.split(". ")[-1].removesuffix(".") in following.text  # its last sentence is repeated


def test_sizes_are_checked() -> None:
    for limit, overlap in ((0, 0), (4, 4), (4, -1)):
        with pytest.raises(ValueError, match="limit="):
            list(chunk_document(document(PAGE), word_starts(PAGE), limit, overlap))


def test_the_time_is_linear() -> None:
    """Much white space, each character of which is a token; and as many headings."""
    for text in (" " * 40_000, "# a\n" * 10_000, "a" * 40_000):
        before = time.process_time()
        list(chunk_document(document(text), character_starts(text), 64, 16))
        assert time.process_time() - before < 8


def test_random_documents_are_chunked_alike_twice() -> None:
    rng = random.Random(0)
    text = "".join(rng.choice(["word ", "end. ", "\n\n", "# title\n"]) for _ in range(500))
    runs = [list(chunk_document(document(text), word_starts(text), 20, 5)) for _ in range(2)]
    assert runs[0] == runs[1] and len(runs[0]) > 10
