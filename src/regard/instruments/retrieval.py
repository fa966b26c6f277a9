"""Answering from documents: a question, its vector, the passages that match it, the prompt, and an answer with sources.

The documents are those below. Chunks, index, search, sources and prompt are those of `regard ask`; two parts stand in
for models, so that nothing is downloaded:

    vectors    hashed triples of letters (Weinberger et al. 2009), weighted by how rare they are: they match parts of
               words and misspelt ones, but no synonyms, which an encoder learns
    answer     the sentence of the sources that is nearest to the question, where a chat model would write one
"""

import re
import zlib
from collections import Counter
from collections.abc import Sequence
from functools import cache
from math import log
from typing import NamedTuple

import numpy as np

from regard.instruments.instrument import Instrument, Panel, Quiz, Selection, Slider, TextField
from regard.instruments.panels import bars, heatmap, numbers, table, tokens
from regard.retrieval.chunks import chunk_document
from regard.retrieval.document_index import DocumentIndex, Hit, IndexSettings
from regard.retrieval.documents import parse_document
from regard.retrieval.search import hybrid_scores, search
from regard.retrieval.sources import choose_sources
from regard.retrieval.update_index import embedded_text
from regard.text.source_prompt import PromptSource, cited_sources, question_messages

DOCUMENTS = {
    "light.md": """# The light

## Lamp
The lamp is lit at sunset and put out at sunrise. It turns once in twelve seconds.

## Fog
The horn sounds every minute while the far shore is hidden by fog.

## Power
If the cable from the mainland fails, a generator in the cellar starts. Its fuel lasts nine days.
""",
    "house.md": """# The house

## Water
Rain from the roof fills two tanks. Boil it before you drink it.

## Visitors
Visitors may climb the tower on Saturdays. The stairs are steep, so children need good shoes.
""",
    "boat.md": """# The boat

## Timetable
The boat brings food and letters on Tuesdays. After a storm it comes on the first calm day.

## Emergencies
Call the rescue station on channel 16. The bandages are in the red box beside the door.
""",
}
WORD, LETTERS = re.compile(r"\S+"), re.compile(r"\w+")
SENTENCE = re.compile(r"[^.]+\.")
OVERLAP = 4  # words of a chunk that the next one repeats
WIDTHS = ("8", "16", "32", "64", "128", "256")
SHOWN = 16  # numbers of a vector


def triples(text: str) -> list[str]:
    """Of the letters of each word, with a space before and after it."""
    words = [f" {word} " for word in LETTERS.findall(text.lower())]
    return [word[i : i + 3] for word in words for i in range(len(word) - 2)]


@cache
def rarity() -> dict[str, float]:
    """log(passages / passages with the triple); a triple that is in none is left out."""
    passages = [set(triples(part)) for document in DOCUMENTS.values() for part in document.split("## ")[1:]]
    counts = Counter(triple for passage in passages for triple in passage)
    return {triple: log(len(passages) / count) for triple, count in counts.items()}


def hashed_vectors(texts: Sequence[str], width: int) -> np.ndarray:
    """(N, width) of length 1; zeros for a text without a known triple. The hash of a triple chooses its coordinate and
    its sign."""
    vectors = np.zeros((len(texts), width))
    for vector, text in zip(vectors, texts, strict=True):
        for triple in triples(text):
            code = zlib.crc32(triple.encode("utf-8", "replace"))
            vector[(code >> 1) % width] += (1 if code & 1 else -1) * rarity().get(triple, 0.0)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def index_documents(words: int, width: int) -> DocumentIndex:
    """An index in memory; a chunk has at most this many words. SQLite wants one per thread, so none is kept."""
    settings = IndexSettings("hashed triples of letters", "", width, words, OVERLAP)
    index = DocumentIndex(":memory:", settings)
    for name, text in DOCUMENTS.items():
        document = parse_document(text.encode(), ".md", name)
        starts = [match.start() for match in WORD.finditer(document.text)]
        chunks = list(chunk_document(document, starts, settings.limit, settings.overlap))
        file, _ = index.begin(name, len(text), 0, b"", document.unit)
        index.add(file, chunks, hashed_vectors([embedded_text(chunk) for chunk in chunks], width))
        index.finish(file)
    return index


class ScoredHit(NamedTuple):
    hit: Hit
    cosine: float
    bm25: float
    score: float  # of the chosen search

    @property
    def name(self) -> str:
        return f"{self.hit.path}:{self.hit.chunk.first} {self.hit.chunk.section[-1]}"


def score_all(index: DocumentIndex, question: str, vector: np.ndarray, method: str) -> list[ScoredHit]:
    """All passages, the best first; one that the search does not find has a score of 0."""
    count = index.chunk_count()
    cosines, bm25 = dict(index.vectors.nearest(vector, count)), dict(index.matching(question, count))
    scores = {"vectors": cosines, "words": bm25, "hybrid": hybrid_scores(index, vector, list(cosines), bm25)}[method]
    scored = [
        ScoredHit(hit, cosines[hit.id], bm25.get(hit.id, 0.0), scores.get(hit.id, 0.0))
        for hit in index.hits(list(cosines))
    ]
    return sorted(scored, key=lambda found: (-found.score, found.hit.id))


def nearest_sentence(question: str, sources: Sequence[PromptSource], width: int) -> str:
    """With the number of its source, as a model is asked to cite it."""
    sentences = [
        f"{' '.join(match[0].split())} [{source.number}]"
        for source in sources
        for match in SENTENCE.finditer(re.sub(r"(?m)^#.*$", "", source.text))
    ]
    if not sentences:
        return "The sources do not answer the question."
    vectors = hashed_vectors([sentence.rpartition(" [")[0] for sentence in sentences], width)
    return sentences[int((vectors @ hashed_vectors([question], width)[0]).argmax())]


def question_panel(question: str) -> Panel:
    """Its words, tinted by the rarity of their rarest triple that a passage has."""
    words, largest = question.split(), max(rarity().values())
    values = [max((rarity().get(triple, 0.0) for triple in triples(word)), default=0.0) / largest for word in words]
    notes = [
        "in no passage" if not any(triple in rarity() for triple in triples(word)) else ""
        for word in words
    ]  # fmt: skip
    return tokens("1 · the question; words with rare triples of letters are tinted", words, values, notes)


def prompt_panel(question: str, sources: Sequence[PromptSource]) -> Panel:
    """The messages line by line."""
    lines = [
        (message["role"] if i == 0 else "", line)
        for message in question_messages(question, sources)
        for i, line in enumerate(line for line in message["content"].splitlines() if line)
    ]
    return table(f"4 · the prompt with {len(sources)} sources", ("role", "text"), lines)


def answer_panel(answer: str, sources: Sequence[PromptSource]) -> Panel:
    """Its words; a citation is tinted, and leads to its place."""
    places = {f"[{source.number}]": source.place for source in cited_sources(answer, sources)}
    words = answer.split()
    title = "5 · the answer: the nearest sentence of the sources, in place of a chat model"
    return tokens(title, words, [word in places for word in words], [places.get(word, "") for word in words])


def retrieve(question: str, method: str, count: int, budget: int, words: int, width: int) -> list[Panel]:
    dim = int(WIDTHS[width])
    index = index_documents(words, dim)

    def embed(texts: Sequence[str]) -> np.ndarray:
        return hashed_vectors(texts, dim)

    hits = search(index, question, embed, count, method)  # ty: ignore[invalid-argument-type]
    scored = score_all(index, question, embed([question])[0], method)
    index.close()
    sources = choose_sources(hits, lambda prompt: len(prompt.split()), budget)
    answer = nearest_sentence(question, sources, dim)
    vectors = embed([question, *(embedded_text(hit.chunk) for hit in hits)])
    prompt = " ".join(message["content"] for message in question_messages(question, sources))
    return [
        question_panel(question),
        heatmap(
            f"2 · its vector, and those of the best {len(hits)}" + (f"; {SHOWN} of {dim} numbers" * (dim > SHOWN)),
            vectors[:, :SHOWN].tolist(),
            ["question", *(hit.chunk.section[-1] for hit in hits)],
            [str(i) for i in range(min(dim, SHOWN))],
            "signed",
            shows_numbers=dim <= 8,
        ),
        bars(
            f"3 · score of the {len(scored)} stored passages, {method}",
            [(found.name, round(found.score, 4)) for found in scored],
        ),
        prompt_panel(question, sources),
        answer_panel(answer, sources),
        table(
            "the passages",
            ("place", "section", "text", "cosine", "BM25", "score"),
            [
                (hit.path, " > ".join(hit.chunk.section), hit.chunk.text, *(round(score, 4) for score in scores))
                for hit, *scores in scored
            ],
        ),
        numbers(
            {
                "passages found": f"{len(hits)} of {count}",
                "sources in the prompt": len(sources),
                "words of the prompt": len(prompt.split()),
                "numbers in a vector": dim,
            }
        ),
    ]  # fmt: skip


INSTRUMENTS = (
    Instrument(
        "retrieval", "Answers from documents",
        "The passages that fit a question best enter the prompt, and the answer cites them: nothing is trained again.",
        r"\text{score}(d) = \tfrac{1}{2}\,\frac{\cos(q, d)}{\max_{d'} \cos(q, d')} + "
        r"\tfrac{1}{2}\,\frac{\text{BM25}(q, d)}{\max_{d'} \text{BM25}(q, d')}",
        (
            TextField("question", "question", "When does the boat bring letters?"),
            Selection("method", "search", ("hybrid", "vectors", "words"), "hybrid"),
            Slider("count", "passages that are searched for", 1, 7, 2),
            Slider("budget", "words of the sources, at most", 20, 200, 100, 10),
            Slider("words", "words per passage, at most", 10, 60, 40),
            Slider("width", "numbers in a vector", 0, len(WIDTHS) - 1, WIDTHS.index("64"), names=WIDTHS),
        ),
        Quiz(
            "Every word of a question is misspelt: vistors, climing, towr. Which search finds the passage?",
            "The one by vectors: most triples of letters are still right. BM25 knows whole words only and finds "
            "nothing, so the prompt has no source.",
            {"question": "vistors climing towr", "method": "vectors"},
        ),
        retrieve,
        ("retrieval/chunks.py", "retrieval/search.py", "retrieval/sources.py", "text/source_prompt.py"),
    ),
)  # fmt: skip
