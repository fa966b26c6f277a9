"""Sources of documents.

A source is an endless sequence: `document(i)` is a pure function of its settings and `i`, so a position in it is one
integer, and every process can read every document. A document is a tuple of spans, each with a loss weight for its
tokens. A finite collection is shuffled again for every epoch. One document in ten is held out, selected by a hash of
its text, so that copies of a document are in the same split.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, Protocol

from regard.data.world import SPLITS, Story, story
from regard.text.chat import ASSISTANT, END, SYSTEM, USER

ROLE_TOKENS = {"user": USER, "assistant": ASSISTANT, "system": SYSTEM}
CHUNK_CHARACTERS = 4000  # approximate; a text file is split at ends of lines


class Span(NamedTuple):
    text: str
    weight: float = 1.0
    special: bool = False  # the text is a special token such as <|user|>; in other spans it is encoded as characters


Document = tuple[Span, ...]


class DataSource(Protocol):
    @property
    def name(self) -> str: ...

    def document(self, index: int) -> Document: ...


@dataclass(frozen=True)
class WorldSource:
    """Stories of the simulated world as conversations: the story, then questions and answers in turns.

    The next event of a story is random. A model trained equally on all tokens spends its capacity on predicting events
    long before it learns to retrieve facts. Answers therefore have weight 1, story and questions less.
    """

    level: int = 1
    split: str = "train"
    seed: int = 0
    story_weight: float = 0.1
    question_weight: float = 0.0

    @property
    def name(self) -> str:
        return f"world level {self.level}, {self.split}, seed {self.seed}"

    def document(self, index: int) -> Document:
        return self.conversation(story((self.seed << 40) + index, self.level, self.split))

    def conversation(self, story: Story) -> Document:
        spans = [Span(USER, 0.0, special=True), Span(f" {story.text}", self.story_weight)]
        for number, question in enumerate(story.questions):
            if number:
                spans.append(Span(USER, 0.0, special=True))
            spans += [
                Span(f" {question.text}", self.question_weight),
                Span(ASSISTANT, 0.0, special=True),
                Span(f" {question.answer}"),
                Span(END, special=True),
            ]
        return tuple(spans)


@dataclass(frozen=True)
class ShuffledSource:
    """A finite collection, repeated, in a new random order for each epoch."""

    name: str
    documents: list[Document]
    seed: int = 0
    _orders: dict[int, list[int]] = field(default_factory=dict, repr=False)

    def document(self, index: int) -> Document:
        epoch, position = divmod(index, len(self.documents))
        if epoch not in self._orders:
            order = list(range(len(self.documents)))
            Random(f"{self.seed}/{epoch}").shuffle(order)
            self._orders.clear()
            self._orders[epoch] = order
        return self.documents[self._orders[epoch][position]]


def world(level: int = 1, split: str = "train", seed: int = 0) -> WorldSource:
    return WorldSource(level, split, seed)


def pydoc(split: str = "train", seed: int = 0) -> ShuffledSource:
    """The text of the Python manual that every Python installation contains."""
    from pydoc_data.topics import topics

    return _shuffled("pydoc", (_text_document(topics[name]) for name in sorted(topics)), split, seed)


def text_file(path: str | Path, split: str = "train", seed: int = 0) -> ShuffledSource:
    """One text file, split into documents at ends of lines."""
    chunks = split_lines(_read(Path(path)))
    return _shuffled(f"text file {path}", ((Span(chunk),) for chunk in chunks), split, seed)


def folder(path: str | Path, split: str = "train", seed: int = 0, pattern: str = "**/*.txt") -> ShuffledSource:
    """The matching files of a folder, each a document."""
    files = sorted(file for file in Path(path).glob(pattern) if file.is_file())
    if not files:
        raise ValueError(f"{path} has no file that matches {pattern!r}, and other files are not read; rename the files")
    return _shuffled(f"folder {path}", (_text_document(_read(file)) for file in files), split, seed)


def jsonl(path: str | Path, split: str = "train", seed: int = 0) -> ShuffledSource:
    """One JSON object per line, with `text`, or with `messages`, of which only the assistant's have a loss."""
    lines = enumerate(_read(Path(path)).split("\n"), start=1)
    documents = (_parse(line, f"{path}, line {number}") for number, line in lines if line.strip())
    return _shuffled(f"jsonl {path}", documents, split, seed)


def split_lines(text: str, size: int = CHUNK_CHARACTERS) -> Iterator[str]:
    """Chunks of at most `size` characters, which end at the end of a line unless the line is longer."""
    start = 0
    while start < len(text):
        line_end = text.rfind("\n", start, start + size) + 1
        end = line_end if line_end > start else start + size
        yield text[start:end]
        start = end


def _text_document(text: str) -> Document:
    return (Span(text), Span(END, special=True))


def _shuffled(name: str, documents: Iterable[Document], split: str, seed: int) -> ShuffledSource:
    if split not in SPLITS:
        raise ValueError(f"split={split!r} is not a split; choose one of {', '.join(SPLITS)}")
    nonempty = [document for document in documents if any(span.text for span in document if not span.special)]
    selected = [document for document in nonempty if _split_of(document) == split]
    if not selected:
        raise ValueError(f"{name}: none of its {len(nonempty)} documents is in the {split} split; add more text")
    return ShuffledSource(f"{name}, {split}, seed {seed}", selected, seed)


def _split_of(document: Document) -> str:
    text = "".join(span.text for span in document)
    return "held-out" if blake2b(text.encode(), digest_size=8).digest()[0] < 26 else "train"


def _parse(line: str, origin: str) -> Document:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{origin}: not valid JSON ({error}); write one object per line") from error
    if isinstance(row, dict) and isinstance(row.get("text"), str):
        return _text_document(row["text"])
    if isinstance(row, dict) and isinstance(row.get("messages"), list):
        return tuple(span for message in row["messages"] for span in _message_spans(message, origin))
    raise ValueError(f"{origin}: expected an object with `text` (a string) or `messages` (a list)")


def _message_spans(message: Any, origin: str) -> Document:
    if (
        not isinstance(message, dict)
        or message.get("role") not in ROLE_TOKENS
        or not isinstance(message.get("content"), str)
    ):
        raise ValueError(f"{origin}: a message needs `role` ({', '.join(ROLE_TOKENS)}) and `content` (a string)")
    role = Span(ROLE_TOKENS[message["role"]], 0.0, special=True)
    content = f" {message['content'].strip()}"
    if message["role"] == "assistant":
        return (role, Span(content), Span(END, special=True))
    return (role, Span(content, 0.0))


def _read(path: Path) -> str:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file; check the path")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error.reason} at byte {error.start}); convert it first") from error
