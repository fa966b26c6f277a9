"""Chunks: parts of a document of at most `limit` tokens, cut where its structure allows.

    a cut before token i    3: a heading begins        2: after a blank line        1: after a line or a sentence
                            0: after white space      -1: within a word

A chunk ends before the first heading after an eighth of the limit; else at the strongest, then latest cut of its second
half. Unless it begins with a heading, a chunk repeats up to `overlap` tokens of the one before, from the beginning of a
sentence, so that no sentence loses what it refers to. Its text is a slice of the document: a citation leads back to it.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from regard.retrieval.documents import ParsedDocument, first_letter

HEADING, BLANK_LINE, SENTENCE, SPACE, WITHIN_WORD = 3, 2, 1, 0, -1
SENTENCE_END = re.compile(r"[.!?…。！？][)\]\"'”’»]*$")
FULL_STOPS = ("。", "！", "？")  # after which no space follows


@dataclass(frozen=True)
class DocumentChunk:
    text: str
    start: int  # of the text in the document
    first: int  # line of the file, or page
    last: int
    section: tuple[str, ...]  # titles, the outermost first; of the text after its first headings


def chunk_document(
    document: ParsedDocument, token_starts: Sequence[int], limit: int, overlap: int
) -> Iterator[DocumentChunk]:
    """token_starts: the index in the text of the first character of each token."""
    if limit < 1 or not 0 <= overlap < limit:
        raise ValueError(f"limit={limit} must be positive, and overlap={overlap} from 0 to limit - 1")
    text, covered = document.text, 0
    for first, end in spans(cut_strengths(document, token_starts), limit, overlap):
        stop = token_starts[end] if end < len(token_starts) else len(text)
        part = text[token_starts[first] : stop]
        start, stop = token_starts[first] + len(part) - len(part.lstrip()), token_starts[first] + len(part.rstrip())
        if stop > max(start, covered):  # there is more than white space after the overlap
            covered = stop
            section = document.section(min(document.after_headings(start, stop), stop - 1))
            yield DocumentChunk(text[start:stop], start, document.place(start), document.place(stop - 1), section)


def spans(strengths: Sequence[int], limit: int, overlap: int) -> Iterator[tuple[int, int]]:
    """(first token, end) of each chunk. strengths: of a cut before each token."""
    start, used = 0, 0  # used: tokens of earlier chunks
    while used < len(strengths):
        end = next_cut(strengths, start, max(used + 1, start + 1), limit)
        yield start, end
        if end < len(strengths) and strengths[end] < HEADING:
            start = next_start(strengths, max(start + 1, end - overlap), end)
        else:
            start = end
        used = end


def next_cut(strengths: Sequence[int], start: int, least: int, limit: int) -> int:
    """The end of a chunk from this token on, which has at least the tokens before `least`."""
    last = start + limit
    headings = (i for i in range(max(least, start + limit // 8), min(last, len(strengths))) if strengths[i] == HEADING)
    if (heading := next(headings, None)) is not None:
        return heading
    if last >= len(strengths):
        return len(strengths)
    cuts = range(max(least, start + limit // 2), last + 1)
    best = max(cuts, key=lambda i: (strengths[i], i), default=last)
    return best if strengths[best] > WITHIN_WORD else whole_word(strengths, least, last)


def whole_word(strengths: Sequence[int], least: int, last: int) -> int:
    """The latest cut that is not within a word; `last` if a single word is longer."""
    return next((i for i in range(last, least - 1, -1) if strengths[i] > WITHIN_WORD), last)


def next_start(strengths: Sequence[int], earliest: int, end: int) -> int:
    """Where a chunk begins after one with this end: at a sentence if the overlap has one, else at a word."""
    for least in (SENTENCE, SPACE):
        for i in range(earliest, end):
            if strengths[i] >= least:
                return i
    return end


def cut_strengths(document: ParsedDocument, token_starts: Sequence[int]) -> list[int]:
    """Of a cut before each token. A token may begin with white space."""
    text, spaces = document.text, list(re.finditer(r"\s+", document.text))
    titles = {first_letter(text, heading.start) for heading in document.headings}
    at_space = [HEADING if space.end() in titles else space_strength(text, space) for space in spaces]
    strengths, i = [], 0
    for start in token_starts:
        while i < len(spaces) and spaces[i].end() < start:
            i += 1
        if i < len(spaces) and spaces[i].start() <= start:  # the space is before or around the start of the token
            strengths.append(at_space[i])
        elif start in titles:
            strengths.append(HEADING)
        else:
            strengths.append(SENTENCE if text[start - 1 : start] in FULL_STOPS else WITHIN_WORD)
    return strengths


def space_strength(text: str, space: re.Match[str]) -> int:
    """Of a cut at this white space, if no heading follows it."""
    if space[0].count("\n") > 1:
        return BLANK_LINE
    before = text[max(0, space.start() - 4) : space.start()]
    return SENTENCE if "\n" in space[0] or SENTENCE_END.search(before) else SPACE
