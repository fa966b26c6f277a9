"""The sources of an answer: the best chunks within a budget of tokens (text/source_prompt.py writes the prompt).

Chunks of a file that overlap become one source.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from regard.retrieval.document_index import Hit
from regard.text.source_prompt import PromptSource


def choose_sources(hits: Sequence[Hit], count_tokens: Callable[[str], int], budget: int) -> list[PromptSource]:
    """The sources with as many of the hits, the best first, as fit into this number of tokens.

    A hit that does not fit is left out; a later, shorter one may fit.
    """
    chosen: list[PromptSource] = []
    for hit in hits:
        candidate = number_sources(add_hit(chosen, hit))
        if count_tokens("".join(source.prompt for source in candidate)) <= budget:
            chosen = candidate
    return chosen


def add_hit(sources: Sequence[PromptSource], hit: Hit) -> list[PromptSource]:
    """The sources with one more hit, as a new source or in those that it overlaps."""
    chunk = hit.chunk
    added = PromptSource(
        0, hit.path, hit.unit, chunk.first, chunk.last, chunk.section, chunk.start, chunk.text, hit.score
    )
    overlapping = [source for source in sources if overlaps(source, added)]
    if not overlapping:
        return [*sources, added]
    for source in overlapping:
        added = join(source, added)
    added = replace(added, score=overlapping[0].score)  # of the highest ranked hit, which came first
    return [added if source is overlapping[0] else source for source in sources if source not in overlapping[1:]]


def overlaps(a: PromptSource, b: PromptSource) -> bool:
    """Whether two sources are of one file and section, and share a part of it."""
    first, second = (a, b) if a.start <= b.start else (b, a)
    return (a.path, a.section) == (b.path, b.section) and second.start <= first.start + len(first.text)


def join(a: PromptSource, b: PromptSource) -> PromptSource:
    first, second = (a, b) if a.start <= b.start else (b, a)
    shared = first.start + len(first.text) - second.start
    text = first.text + second.text[shared:]
    return replace(first, last=max(a.last, b.last), text=text)


def number_sources(sources: Sequence[PromptSource]) -> list[PromptSource]:
    return [replace(source, number=number) for number, source in enumerate(sources, 1)]
