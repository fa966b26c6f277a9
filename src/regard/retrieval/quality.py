"""How well an index finds the passages that answer questions.

    recall@k = the share of questions with a relevant chunk among the first k
    MRR      = mean over the questions of 1 / rank of the first relevant chunk, 0 if there is none

A question names the file of its answer, and optionally the line (or page): a chunk that covers it is relevant.
"""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.retrieval.document_index import Hit
from regard.retrieval.documents import SURROGATES
from regard.text.source_prompt import CITATION, PromptSource

DEPTHS = (1, 5, 10)


@dataclass(frozen=True)
class LabelledQuestion:
    text: str
    path: str  # of the file that answers it, or the end of that path, normalized
    line: int | None = None  # or page
    answer: str | None = None

    def is_in(self, source: PromptSource) -> bool:
        """Whether a source has the passage that answers the question."""
        return self.covers(source.path, source.first, source.last)

    def is_about(self, path: str) -> bool:
        return f"/{path}".endswith(f"/{self.path}")  # of an index, so it has no `.` and no double slashes

    def covers(self, path: str, first: int, last: int) -> bool:
        return self.is_about(path) and (self.line is None or first <= self.line <= last)

    def rank(self, hits: Sequence[Hit]) -> int | None:
        """Of the first relevant hit, from 1."""
        ranks = (n for n, hit in enumerate(hits, 1) if self.covers(hit.path, hit.chunk.first, hit.chunk.last))
        return next(ranks, None)


@dataclass(frozen=True)
class SearchQuality:
    recall: dict[int, float]
    mrr: float
    error: float | None  # standard error of the MRR; None with one question

    @classmethod
    def of(cls, ranks: Sequence[int | None]) -> "SearchQuality":
        reciprocal = [0.0 if rank is None else 1 / rank for rank in ranks]
        recall = {depth: statistics.fmean(r is not None and r <= depth for r in ranks) for depth in DEPTHS}
        error = statistics.stdev(reciprocal) / math.sqrt(len(ranks)) if len(ranks) > 1 else None
        return cls(recall, statistics.fmean(reciprocal), error)

    def as_dict(self) -> dict[str, float | None]:
        return {f"recall@{depth}": share for depth, share in self.recall.items()} | {
            "mrr": self.mrr,
            "error": self.error,
        }


def is_correct(output: str, answer: str) -> bool:
    """Whether an output without its citations is the answer, but for case and a period."""
    return without_citations(output) == without_citations(answer)


def without_citations(text: str) -> str:
    return " ".join(CITATION.sub("", text).split()).rstrip(" .").casefold()


def read_questions(path: str | Path) -> list[LabelledQuestion]:
    """A JSONL file of objects with `question`, `path`, and optionally `line` and `answer`."""
    questions = []
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")  # strings may have U+2028
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                questions.append(parse_question(json.loads(line)))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    if not questions:
        raise ValueError(f'{path} has no questions; write one per line: {{"question": "…", "path": "notes.md"}}')
    return questions


def is_usable(value: str | int | None) -> bool:
    """Texts are not blank and have no lone surrogates; numbers are lines or pages."""
    if isinstance(value, str):
        return bool(value.strip()) and SURROGATES.search(value) is None
    return value is None or 0 < value < 2**31


def parse_question(row: Any) -> LabelledQuestion:
    if not isinstance(row, dict):
        raise ValueError('this is no object; write {"question": "…", "path": "notes.md"}')
    types = {"question": str, "path": str, "line": int | None, "answer": str | None}
    for name, kind in types.items():
        value = row.get(name)
        if not isinstance(value, kind) or isinstance(value, bool) or not is_usable(value):
            raise ValueError(
                f"`{name}` is {value!r:.40}; questions have `question`, `path`, and maybe `line`, `answer`"
            )
    return LabelledQuestion(row["question"], str(Path(row["path"])), row.get("line"), row.get("answer"))
