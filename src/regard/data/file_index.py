"""Byte offsets of the examples in a file, found in one pass without keeping the file in memory.

Every function returns an int64 array of n + 1 offsets: example i is in the bytes from `offsets[i]` to `offsets[i + 1]`.
An index takes eight bytes per example. Files are UTF-8; `line_at` converts an offset to a line number for errors.
"""

import csv
import json
import threading
from array import array
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np

BLOCK_BYTES = 1 << 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
MAX_CHUNK_BYTES, MIN_CHUNK_BYTES = 4000, 128
CHUNKS_OF_SMALL_FILES = 64  # a file with fewer than 64 * 4000 bytes has smaller chunks, so that it has several
FIELD_LIMIT = threading.RLock()  # held while the limit of the csv module, which all threads share, is raised
WHITESPACE = np.zeros(256, dtype=bool)
WHITESPACE[list(b" \t\r\n\v\f")] = True


class FileError(ValueError):
    """A file that cannot be read as the format requires; the message names the file, the line and the fault."""


def index_lines(path: Path) -> np.ndarray:
    """Lines that are not blank."""
    return _offsets(path, [starts[~blank] for starts, blank in _scan_lines(path)])


def index_paragraphs(path: Path) -> np.ndarray:
    """Groups of lines that are separated by blank lines."""
    parts, previous_blank = [], True
    for starts, blank in _scan_lines(path):
        after_blank = np.concatenate([[previous_blank], blank[:-1]])
        parts.append(starts[~blank & after_blank])
        previous_blank = bool(blank[-1])
    return _offsets(path, parts)


def index_chunks(path: Path) -> np.ndarray:
    """Chunks of a few thousand bytes, fewer in small files, which end at the end of a line unless it is longer."""
    size = path.stat().st_size
    limit = min(MAX_CHUNK_BYTES, max(MIN_CHUNK_BYTES, size // CHUNKS_OF_SMALL_FILES))
    offsets = array("q", [0])
    with path.open("rb") as stream:
        while size - offsets[-1] > limit:
            stream.seek(offsets[-1])
            block = stream.read(limit + 1)
            offsets.append(offsets[-1] + (block.rfind(b"\n", 0, limit) + 1 or _character_end(block, limit)))
        stream.seek(0)
        is_blank = all(not block.strip() for block in iter(lambda: stream.read(BLOCK_BYTES), b""))
    if is_blank:
        return np.array([0], dtype=np.int64)
    return np.array([*offsets, size], dtype=np.int64)


def index_whole(path: Path) -> np.ndarray:
    """The file as one example."""
    size = path.stat().st_size
    return np.array([0, size] if size else [0], dtype=np.int64)


def index_json_array(path: Path) -> np.ndarray:
    """The objects of a JSON array. Their slices end with the comma or bracket that follows them."""
    decode = json.JSONDecoder().raw_decode
    offsets = array("q")
    with path.open("rb") as stream:
        window = _Window(stream)
        window.skip(BYTE_ORDER_MARK)
        if window.next_character() != "[":
            raise FileError(f"{path}: expected a JSON array of objects; for one object per line, name it .jsonl")
        window.position += 1
        while (character := window.next_character()) != "]":
            if offsets and character == ",":
                window.position += 1
                character = window.next_character()
            elif offsets:
                raise FileError(f"{place(path, window.offset)}: expected ',' or ']' after an object of the array")
            if character != "{":
                raise FileError(f'{place(path, window.offset)}: expected an object such as {{"text": …}}')
            offsets.append(window.offset)
            while True:
                try:
                    _, window.position = decode(window.text, window.position)
                    break
                except (json.JSONDecodeError, RecursionError) as error:
                    if not window.cuts(error) or not window.extend():
                        raise FileError(f"{place(path, offsets[-1])}: not valid JSON ({error})") from None
        offsets.append(window.offset)
    return np.array(offsets, dtype=np.int64)


def index_records(path: Path, delimiter: str) -> np.ndarray:
    """Records of CSV or TSV, the header first. A quoted field may contain ends of lines."""
    offsets = array("q", [0])
    with path.open("rb") as stream, unlimited_fields():
        position = 0

        def lines() -> Iterator[str]:
            nonlocal position
            for line in stream:
                position += len(line)
                try:
                    yield line.decode("utf-8")
                except UnicodeDecodeError as error:
                    raise not_utf8(path, position - len(line) + error.start, error) from None

        try:
            for record in csv.reader(lines(), delimiter=delimiter, strict=True):
                if record:
                    offsets.append(position)
                else:  # a blank line, which belongs to the slice of the previous record
                    offsets[-1] = position
        except csv.Error as error:
            raise FileError(f"{place(path, offsets[-1])}: not valid CSV ({error}); check the quotes") from None
    return np.array(offsets, dtype=np.int64)


@contextmanager
def unlimited_fields() -> Generator[None]:
    """Raise the limit of 131,072 characters per field, which is a setting of the csv module."""
    with FIELD_LIMIT:
        previous = csv.field_size_limit(1 << 30)
        try:
            yield
        finally:
            csv.field_size_limit(previous)


def line_at(path: Path, offset: int) -> int:
    """The number of the line, from 1, that holds the byte at `offset`."""
    lines = 1
    with path.open("rb") as stream:
        while offset > 0 and (block := stream.read(min(BLOCK_BYTES, offset))):
            lines += block.count(b"\n")
            offset -= len(block)
    return lines


def place(path: Path, offset: int) -> str:
    return f"{path}, line {line_at(path, offset)}"


def not_utf8(path: Path, offset: int, error: UnicodeDecodeError) -> FileError:
    return FileError(
        f"{place(path, offset)}: not UTF-8 ({error.reason} at byte {offset}); convert the file, for example by "
        "iconv -f latin1 -t utf-8"
    )


class _Window:
    """The part of a file that a JSON decoder reads, as Latin-1, so that characters are bytes."""

    def __init__(self, stream: BinaryIO):
        self.stream, self.text, self.position, self.dropped = stream, "", 0, 0
        self.extend()

    @property
    def offset(self) -> int:
        return self.dropped + self.position

    def skip(self, prefix: bytes) -> None:
        if self.text.startswith(prefix.decode("latin-1")):
            self.position += len(prefix)

    def extend(self) -> bool:
        """Drop the text before the position, and read at least as much as remains. False at the end of the file."""
        remaining = self.text[self.position :]
        block = self.stream.read(max(BLOCK_BYTES, len(remaining)))
        self.dropped += self.position
        self.text, self.position = remaining + block.decode("latin-1"), 0
        return bool(block)

    def cuts(self, error: Exception) -> bool:
        """Whether the error may be due to the end of the window."""
        if not isinstance(error, json.JSONDecodeError):
            return False
        return error.msg.startswith("Unterminated string") or error.pos > len(self.text) - 16

    def next_character(self) -> str:
        """The next character that is not whitespace, or an empty string at the end of the file."""
        while True:
            while self.position < len(self.text):
                if self.text[self.position] not in " \t\r\n":
                    return self.text[self.position]
                self.position += 1
            if not self.extend():
                return ""


def _scan_lines(path: Path) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For consecutive groups of lines: the offset of each, and whether it is blank."""
    first, blank_so_far = 0, True  # the line that continues from the previous block
    with path.open("rb") as stream:
        offset = len(BYTE_ORDER_MARK) if stream.read(3) == BYTE_ORDER_MARK else 0
        first = offset
        stream.seek(offset)
        while data := stream.read(BLOCK_BYTES):
            block = np.frombuffer(data, dtype=np.uint8)
            ends = np.flatnonzero(block == ord("\n")) + 1
            starts = np.concatenate([[0], ends[ends < len(block)]])
            characters = np.add.reduceat(~WHITESPACE[block], starts, dtype=np.int64)
            blank = characters == 0
            blank[0] &= blank_so_far
            offsets = starts + offset
            offsets[0] = first
            offset += len(block)
            if data.endswith(b"\n"):
                first, blank_so_far = offset, True
            else:  # the last line goes on
                first, blank_so_far = int(offsets[-1]), bool(blank[-1])
                offsets, blank = offsets[:-1], blank[:-1]
            if len(offsets):
                yield offsets, blank
    if first < offset:
        yield np.array([first]), np.array([blank_so_far])


def _offsets(path: Path, starts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([*starts, [path.stat().st_size]]).astype(np.int64)


def _character_end(block: bytes, limit: int) -> int:
    """The largest index up to `limit` at which no character of UTF-8 is cut."""
    end = limit
    while end > limit - 4 and block[end] & 0xC0 == 0x80:
        end -= 1
    return end
