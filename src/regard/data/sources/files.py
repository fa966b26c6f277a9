"""Text of the user (a file, a folder, JSONL), and the text of the Python manual.

.jsonl          one object per line: its keys are those of the example
a folder        the files that match `pattern`, each a document
other files     one text, split into documents at ends of lines
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from regard.data.sources.base import DataSource, Example, Splits, open_collection
from regard.spec import require

CHUNK_CHARACTERS = 4000  # a text file is split into documents of about this size, at ends of lines
MIN_CHUNKS = 20  # a short text is split into this many documents, if they have at least
MIN_CHARACTERS = 100  # characters


@dataclass(frozen=True)
class File(DataSource):
    path: str = ""
    pattern: str = "**/*.txt"  # of the files of a folder
    tail: bool = False  # hold out the last tenth, instead of a tenth that is selected by its content

    def check(self) -> None:
        super().check()
        require(bool(self.path), "file: path is missing; set data.path")

    def open(self, seed: int = 0, hold_out: bool = True) -> Splits:
        return open_collection(f"{self.path}, seed {seed}", self.read(), seed, hold_out, self.tail)

    def read(self) -> list[Example]:
        path = Path(self.path)
        if path.is_dir():
            return read_folder(path, self.pattern)
        text = read_text(path)
        if path.suffix == ".jsonl":
            lines = enumerate(text.split("\n"), start=1)
            return [parse_line(line, f"{path}, line {number}") for number, line in lines if line.strip()]
        return [{"text": chunk, "end": False} for chunk in split_lines(text, chunk_size(len(text))) if chunk.strip()]


@dataclass(frozen=True)
class Pydoc(DataSource):
    """The text of the Python manual that every Python installation contains."""

    def open(self, seed: int = 0, hold_out: bool = True) -> Splits:
        from pydoc_data.topics import topics

        documents = [{"text": topics[name]} for name in sorted(topics) if topics[name]]
        return open_collection(f"pydoc, seed {seed}", documents, seed, hold_out)


def read_folder(path: Path, pattern: str) -> list[Example]:
    files = sorted(file for file in path.glob(pattern) if file.is_file())
    if not files:
        raise ValueError(f"{path} has no file that matches {pattern!r}, and other files are not read; set data.pattern")
    texts = (read_text(file) for file in files)
    return [{"text": text} for text in texts if text]


def read_text(path: Path) -> str:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file or folder; check the path")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error.reason} at byte {error.start}); convert it first") from error


def parse_line(line: str, origin: str) -> Example:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{origin}: not valid JSON ({error}); write one object per line") from error
    if not isinstance(row, dict):
        raise ValueError(f"{origin}: expected an object such as {{'text': '…'}}, found {row!r:.60}")
    return row


def chunk_size(characters: int) -> int:
    return min(CHUNK_CHARACTERS, max(MIN_CHARACTERS, characters // MIN_CHUNKS))


def split_lines(text: str, size: int = CHUNK_CHARACTERS) -> Iterator[str]:
    """Chunks of at most `size` characters, which end at the end of a line unless the line is longer."""
    start = 0
    while start < len(text):
        line_end = text.rfind("\n", start, start + size) + 1
        end = line_end if line_end > start else start + size
        yield text[start:end]
        start = end
