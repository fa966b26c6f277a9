"""The header of a GGUF file, llama.cpp's format: what the model is, its vocabulary, and where each tensor lies.

    "GGUF"  version  tensors  pairs | key type value … | name dims type offset … | padding | data

Everything stands in the file in front of the data, each text and array after its own length. No length is believed:
it is held against the bytes that are left before anything is made of it, so that a file can cost no more than its own
size, and a header no more than `LARGEST`.
"""

import mmap
import struct
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LARGEST = 32 << 20  # bytes; the headers of the largest vocabularies have some twelve million
MOST = 1 << 16  # tensors, and pairs; the largest models have some thousands
MOST_TEXTS = 1 << 20  # in arrays: the pieces of a vocabulary and its merges, at most some 850,000 so far
VERSIONS = (2, 3)
ALIGNMENT = 32

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
FLOAT, TEXT, ARRAY = 6, 8, 9


class GGUFError(ValueError):
    """A file that must not be used: the message names it, and the key or tensor that is wrong."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor, slowest dimension first; `start` counts from the beginning of the file."""

    shape: tuple[int, ...]
    type: int
    start: int


@dataclass(frozen=True)
class Header:
    file: Path
    size: int
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """A value of the metadata that must be of this type, or not be there."""
        found = self.metadata.get(key, default)
        if found is not default and type(found) is not kind:
            raise GGUFError(f"{self.file}: {key}={found!r:.80} should be {kind.__name__}")
        return found


def read_header(file: str | Path) -> Header:
    file = Path(file)
    if not file.is_file():
        raise GGUFError(f"{file} is missing")
    size = file.stat().st_size
    if size < 24:
        raise GGUFError(f"{file} has {size} bytes, too few for a GGUF file")
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), min(size, LARGEST), access=mmap.ACCESS_READ) as bytes_:
        cursor = Cursor(file, bytes_)
        tensors, pairs = cursor.begin()
        metadata = cursor.metadata(pairs)
        align = metadata.get("general.alignment", ALIGNMENT)
        if type(align) is not int or not 0 < align <= 1 << 16 or align & (align - 1):
            raise GGUFError(f"{file}: general.alignment={align!r:.80} should be a power of two")
        return Header(file, size, metadata, cursor.tensors(tensors, align))


class Cursor:
    def __init__(self, file: Path, content: mmap.mmap):
        self.file, self.content, self.at, self.texts = file, content, 0, 0

    def begin(self) -> tuple[int, int]:
        """How many tensors and pairs there are."""
        if self.take(4, "magic") != b"GGUF":
            raise GGUFError(f"{self.file} is no GGUF file: it begins with other bytes")
        (version,) = self.unpack("I", "version")
        if version not in VERSIONS:
            swapped = version & 0xFFFF == 0
            raise GGUFError(
                f"{self.file}: GGUF version {version}{' (big-endian?)' if swapped else ''}; read are 2 and 3"
            )
        counts = self.unpack("QQ", "counts")
        for count, what in zip(counts, ("tensors", "pairs"), strict=True):
            if count > MOST:
                raise GGUFError(f"{self.file}: it says to have {count} {what}; more than {MOST} are not read")
        return counts

    def metadata(self, pairs: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for n in range(pairs):
            key = self.text(f"the name of pair {n}")
            if key in found:
                raise GGUFError(f"{self.file}: {key} stands there twice")
            (kind,) = self.unpack("I", key)
            found[key] = self.array(key) if kind == ARRAY else self.value(kind, key)
        return found

    def tensors(self, count: int, align: int) -> dict[str, TensorInfo]:
        raw: dict[str, TensorInfo] = {}
        for n in range(count):
            name = self.text(f"the name of tensor {n}")
            (dims,) = self.unpack("I", name)
            if name in raw or not 1 <= dims <= 4:
                fault = "stands there twice" if name in raw else f"has {dims} dimensions; read are 1 to 4"
                raise GGUFError(f"{self.file}: {name} {fault}")
            shape = self.unpack(f"{dims}Q", name)[::-1]  # theirs has the fastest first
            kind, offset = self.unpack("IQ", name)
            if not all(shape) or offset % align:
                raise GGUFError(f"{self.file}: {name} has shape {shape} and lies at {offset}; sizes must be positive, "
                                f"places multiples of {align}")  # fmt: skip
            raw[name] = TensorInfo(shape, kind, offset)
        data = -(-self.at // align) * align
        return {name: TensorInfo(place.shape, place.type, data + place.start) for name, place in raw.items()}

    def value(self, kind: int, key: str) -> Any:
        if kind == TEXT:
            return self.text(key)
        if kind not in SCALARS:
            raise GGUFError(f"{self.file}: {key} has type {kind}; there is none")
        (value,) = self.unpack(SCALARS[kind], key)
        return shortest(value) if kind == FLOAT else value

    def array(self, key: str) -> Any:
        """A list of texts, or an `array` of numbers."""
        kind, count = self.unpack("IQ", key)
        if kind == TEXT:
            self.texts += count
            if self.texts > MOST_TEXTS:
                raise GGUFError(f"{self.file}: {key} has {count} texts; more than {MOST_TEXTS} in all are not read")
            return [self.text(key) for _ in range(count)]
        if kind not in SCALARS:
            raise GGUFError(f"{self.file}: {key} is an array of type {kind}; read are numbers and texts")
        form = SCALARS[kind].replace("?", "B")
        return array(form, self.take(count * struct.calcsize(f"<{form}"), key))

    def text(self, what: str) -> str:
        (length,) = self.unpack("Q", what)
        try:
            return self.take(length, what).decode("utf-8")
        except UnicodeDecodeError as error:
            raise GGUFError(f"{self.file}: {what} is not UTF-8 ({error.reason})") from None

    def unpack(self, form: str, what: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}"), what))

    def take(self, count: int, what: str) -> bytes:
        if count > len(self.content) - self.at:
            raise GGUFError(
                f"{self.file}: {what} goes on for {count} bytes, but {len(self.content) - self.at} are left; "
                f"the file is damaged or cut short, or its header is longer than {LARGEST} bytes"
            )
        self.at += count
        return self.content[self.at - count : self.at]


def shortest(value: float) -> float:
    """The plainest number that is this float32: 1e-05 and not 9.999999747378752e-06."""
    return next((short for digits in range(6, 10) if in_single(short := float(f"{value:.{digits}g}")) == value), value)


def in_single(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]
