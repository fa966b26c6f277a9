"""Sources: where documents come from.

A source is an endless sequence: `document(i)` is a pure function of its settings and `i`, so a position in it is one
number, and any process can ask for any document. A document is a list of spans, each with the weight of its tokens in
the loss. Finite collections are shuffled anew in every epoch. Their held-out part, one document in ten, is chosen by a
hash of the text: copies of a document fall on the same side.
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

MARKERS = {"user": USER, "assistant": ASSISTANT, "system": SYSTEM}
PIECE = 4000  # characters; a text file is cut near here, at the end of a line


class Span(NamedTuple):
    text: str
    weight: float = 1.0
    marker: bool = False  # the text is a marker such as <|user|>; elsewhere such text is only characters


Document = tuple[Span, ...]


class DataSource(Protocol):
    @property
    def name(self) -> str: ...

    def document(self, index: int) -> Document: ...


@dataclass(frozen=True)
class WorldSource:
    """Stories of the small world, each told to an assistant that is then asked about it, turn by turn.

    A model that must predict everything spends its capacity on what cannot be known (what happens next) long before it
    learns to look facts up. So the answers weigh 1, and the story and the questions little.
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

    def conversation(self, told: Story) -> Document:
        spans = [Span(USER, 0.0, marker=True), Span(f" {told.text}", self.story_weight)]
        for number, question in enumerate(told.questions):
            if number:
                spans.append(Span(USER, 0.0, marker=True))
            spans += [
                Span(f" {question.text}", self.question_weight),
                Span(ASSISTANT, 0.0, marker=True),
                Span(f" {question.answer}"),
                Span(END, marker=True),
            ]
        return tuple(spans)


@dataclass(frozen=True)
class ShuffledSource:
    """A finite collection, over and over, in an order that is drawn anew for each epoch."""

    name: str
    documents: list[Document]
    seed: int = 0
    _orders: dict[int, list[int]] = field(default_factory=dict, repr=False)

    def document(self, index: int) -> Document:
        epoch, place = divmod(index, len(self.documents))
        if epoch not in self._orders:
            order = list(range(len(self.documents)))
            Random(f"{self.seed}/{epoch}").shuffle(order)
            self._orders.clear()
            self._orders[epoch] = order
        return self.documents[self._orders[epoch][place]]


def world(level: int = 1, split: str = "train", seed: int = 0) -> WorldSource:
    return WorldSource(level, split, seed)


def pydoc(split: str = "train", seed: int = 0) -> ShuffledSource:
    """The prose of Python's own manual, which every Python carries."""
    from pydoc_data.topics import topics

    return _collection("pydoc", (_plain(topics[name]) for name in sorted(topics)), split, seed)


def text_file(path: str | Path, split: str = "train", seed: int = 0) -> ShuffledSource:
    """One text file, cut into pieces at ends of lines."""
    return _collection(f"text file {path}", ((Span(piece),) for piece in pieces(_read(Path(path)))), split, seed)


def folder(path: str | Path, split: str = "train", seed: int = 0, pattern: str = "**/*.txt") -> ShuffledSource:
    """Every matching file of a folder is a document."""
    files = sorted(file for file in Path(path).glob(pattern) if file.is_file())
    if not files:
        raise ValueError(f"{path} has no file that matches {pattern!r}; check the folder, or give another pattern")
    return _collection(f"folder {path}", (_plain(_read(file)) for file in files), split, seed)


def jsonl(path: str | Path, split: str = "train", seed: int = 0) -> ShuffledSource:
    """A JSON object per line, with `text`, or with `messages` of which what the assistant says is learned."""
    lines = enumerate(_read(Path(path)).split("\n"), start=1)
    documents = (_parse(line, f"{path}, line {number}") for number, line in lines if line.strip())
    return _collection(f"jsonl {path}", documents, split, seed)


def pieces(text: str, size: int = PIECE) -> Iterator[str]:
    """The text in order, in pieces of about `size` characters that end where a line does, if lines are not longer."""
    start = 0
    while start < len(text):
        line_end = text.rfind("\n", start, start + size) + 1
        end = line_end if line_end > start else start + size
        yield text[start:end]
        start = end


def _plain(text: str) -> Document:
    return (Span(text), Span(END, marker=True))


def _collection(name: str, documents: Iterable[Document], split: str, seed: int) -> ShuffledSource:
    if split not in SPLITS:
        raise ValueError(f"split={split!r} is not a split; choose one of {', '.join(SPLITS)}")
    everything = [document for document in documents if any(span.text for span in document if not span.marker)]
    chosen = [document for document in everything if _split_of(document) == split]
    if not chosen:
        raise ValueError(f"{name}: none of its {len(everything)} documents is in the {split} split; give it more text")
    return ShuffledSource(f"{name}, {split}, seed {seed}", chosen, seed)


def _split_of(document: Document) -> str:
    text = "".join(span.text for span in document)
    return "held-out" if blake2b(text.encode(), digest_size=8).digest()[0] < 26 else "train"


def _parse(line: str, origin: str) -> Document:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{origin}: not valid JSON ({error}); write one object per line") from error
    if isinstance(row, dict) and isinstance(row.get("text"), str):
        return _plain(row["text"])
    if isinstance(row, dict) and isinstance(row.get("messages"), list):
        return tuple(span for message in row["messages"] for span in _turn(message, origin))
    raise ValueError(f"{origin}: expected an object with `text` (a string) or `messages` (a list)")


def _turn(message: Any, origin: str) -> Document:
    if (
        not isinstance(message, dict)
        or message.get("role") not in MARKERS
        or not isinstance(message.get("content"), str)
    ):
        raise ValueError(f"{origin}: a message needs `role` ({', '.join(MARKERS)}) and `content` (a string)")
    marker = Span(MARKERS[message["role"]], 0.0, marker=True)
    if message["role"] == "assistant":
        return (marker, Span(f" {message['content'].strip()}"), Span(END, marker=True))
    return (marker, Span(f" {message['content'].strip()}", 0.0))


def _read(path: Path) -> str:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file; check the path")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error.reason} at byte {error.start}); convert it first") from error
