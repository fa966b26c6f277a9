"""Text files, JSON Lines, JSON arrays and CSV: files whose examples are slices of bytes.

`IndexedFile` finds the offsets of the examples when it is opened (file_index.py), and reads and parses one slice per
example. A file that is compressed by gzip is first written uncompressed to the folder of temporary files, because gzip
has no random access.
"""

import csv
import gzip
import io
import json
import os
import shutil
import tempfile
import weakref
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from regard.data.file_index import (
    BLOCK_BYTES,
    BYTE_ORDER_MARK,
    FileError,
    index_chunks,
    index_json_array,
    index_lines,
    index_paragraphs,
    index_records,
    index_whole,
    line_at,
    not_utf8,
    unlimited_fields,
)


class TemporaryCopy:
    """Another form of a file, in the folder of temporary files. It is deleted with the object that wrote it.

    Copies that are unpickled in other processes read the same file.
    """

    def __init__(self, source: Path, write: Callable[[Path, BinaryIO], None]):
        handle, name = tempfile.mkstemp(prefix="regard-", suffix=f"-{source.stem}")
        self.path = Path(name)
        delete = weakref.finalize(self, _delete, self.path, os.getpid())
        try:
            with os.fdopen(handle, "wb") as stream:
                write(source, stream)
        except BaseException:
            delete()
            raise


def _delete(path: Path, process: int) -> None:
    if os.getpid() == process:  # a forked process has a copy of the object, but the file is not its own
        path.unlink(missing_ok=True)


def unzip(source: Path, stream: BinaryIO) -> None:
    try:
        with gzip.open(source) as unzipped:
            shutil.copyfileobj(unzipped, stream, 1 << 20)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise FileError(f"{source} is not a complete gzip file ({error}); copy it again") from None


def parse_text(text: str) -> dict[str, Any]:
    return {"text": text.replace("\r\n", "\n").replace("\r", "\n")}


def parse_chunk(text: str) -> dict[str, Any]:
    """A chunk of a text, which does not end a document."""
    return parse_text(text) | {"end": False}


def parse_line(text: str) -> dict[str, Any]:
    return {"text": text.split("\n", 1)[0].removesuffix("\r")}


def parse_paragraph(text: str) -> dict[str, Any]:
    """The lines without the blank ones that follow."""
    lines = parse_text(text)["text"].split("\n")
    while not lines[-1].strip(" \t\v\f"):
        lines.pop()
    return {"text": "\n".join(lines)}


def parse_json(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON ({error.msg} at character {error.pos}); write one object per line") from None
    except RecursionError:
        raise ValueError("JSON that is nested too deeply; write flat objects") from None
    if not isinstance(value, dict):
        raise ValueError(f'expected an object such as {{"text": …}}, found {json.dumps(value)[:40]}')
    return value


def parse_element(text: str) -> dict[str, Any]:
    """An object of an array, without the comma after it."""
    return parse_json(text[: text.rindex("}") + 1])


@dataclass(frozen=True)
class ParseRecord:
    """Parse a record of CSV or TSV; all values are strings."""

    delimiter: str
    names: tuple[str, ...] = ()

    def values(self, text: str) -> list[str]:
        with unlimited_fields():
            return next(csv.reader(io.StringIO(text, newline="\n"), delimiter=self.delimiter, strict=True))

    def __call__(self, text: str) -> dict[str, Any]:
        values = self.values(text)
        if len(values) != len(self.names):
            raise ValueError(f"{len(values)} values for {len(self.names)} columns ({', '.join(self.names)})")
        return dict(zip(self.names, values, strict=True))


SLICES: dict[str, tuple[Callable[[Path], np.ndarray], Callable[[str], dict[str, Any]]]] = {
    "text": (index_chunks, parse_chunk),
    "lines": (index_lines, parse_line),
    "paragraphs": (index_paragraphs, parse_paragraph),
    "files": (index_whole, parse_text),
    "jsonl": (index_lines, parse_json),
    "json": (index_json_array, parse_element),
    "csv": (partial(index_records, delimiter=","), ParseRecord(",")),
    "tsv": (partial(index_records, delimiter="\t"), ParseRecord("\t")),
}


class IndexedFile:
    """A file of the formats in `SLICES`, which may be compressed by gzip.

    A file named .json that does not start with a bracket is read as JSON Lines.
    """

    def __init__(self, path: Path, format: str):
        self.path = path
        self.copy = TemporaryCopy(path, unzip) if path.suffix == ".gz" else None
        if format == "json" and first_character(self.stored) == b"{":
            format = "jsonl"
        index, self.parse = SLICES[format]
        with self.named_errors():
            self.offsets = index(self.stored)
        self.version = version_of(self.stored.stat())
        if isinstance(self.parse, ParseRecord) and len(self):
            self.parse = self._read_header(self.parse)

    @property
    def stored(self) -> Path:
        """The file, or its copy that is not compressed."""
        return self.copy.path if self.copy else self.path

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def read(self, index: int) -> dict[str, Any]:
        return self._parse(index, self.slice(index))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """All examples in order; the file is opened once."""
        with self._opened() as stream:
            for index in range(len(self)):
                yield self._parse(index, self._read_slice(stream, index))
            self._check_unchanged(stream)

    def origin(self, index: int) -> str:
        return f"{self.path}, line {line_at(self.stored, int(self.offsets[index]))}"

    def slice(self, index: int) -> str:
        """The text of an example."""
        with self._opened(buffering=0) as stream:  # opened for each example, so no process shares a handle
            return self._read_slice(stream, index)

    def _parse(self, index: int, text: str) -> dict[str, Any]:
        try:
            return self.parse(text)
        except ValueError as error:
            raise FileError(f"{self.origin(index)}: {error}") from None

    @contextmanager
    def _opened(self, buffering: int = BLOCK_BYTES) -> Generator[BinaryIO]:
        with self.stored.open("rb", buffering) as stream:
            self._check_unchanged(stream)
            yield stream

    def _check_unchanged(self, stream: BinaryIO) -> None:
        if version_of(os.fstat(stream.fileno())) != self.version:
            raise FileError(f"{self.path} was changed after it was opened; open it again")

    def _read_slice(self, stream: BinaryIO, index: int) -> str:
        start, end = int(self.offsets[index]), int(self.offsets[index + 1])
        if stream.tell() != start:
            stream.seek(start)
        data = stream.read(end - start)
        try:
            return data.decode("utf-8-sig" if start == 0 else "utf-8")
        except UnicodeDecodeError as error:
            with self.named_errors():
                raise not_utf8(self.stored, start + error.start, error) from None

    def _read_header(self, parse: ParseRecord) -> ParseRecord:
        names = parse.values(self.slice(0))
        if len(set(names)) < len(names) or not all(names):
            raise FileError(f"{self.path}, line 1: the names {names} must differ and not be empty; write a header")
        self.offsets = self.offsets[1:]
        return ParseRecord(parse.delimiter, tuple(names))

    @contextmanager
    def named_errors(self) -> Generator[None]:
        """Name the file, not its temporary copy, in errors."""
        try:
            yield
        except FileError as error:
            raise FileError(str(error).replace(str(self.stored), str(self.path))) from None


def version_of(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


def first_character(path: Path) -> bytes:
    """The first byte that is not whitespace."""
    with path.open("rb") as stream:
        block = stream.read(1 << 16).removeprefix(BYTE_ORDER_MARK).lstrip()
    return block[:1]
