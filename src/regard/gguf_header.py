"""The header of a GGUF file, llama.cpp's format: metadata of model and tokenizer, and the offset of each tensor.

    "GGUF"  version  tensor count  metadata count | key type value … | name dims type offset … | padding | data

Strings and arrays are preceded by their length. Every length is checked against the remaining bytes before memory is
allocated, so reading a file costs no more than its size, and a header no more than `MAX_HEADER_BYTES`.
"""

import mmap
import struct
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_HEADER_BYTES = 32 << 20  # the largest published vocabularies need about 12 MB
MAX_ENTRIES = 1 << 16  # tensors, and metadata entries; the largest models have a few thousand
MAX_STRINGS = 1 << 20  # in all arrays: tokens and merges, about 850,000 in the largest published files
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

# type id -> type code of `struct`
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
FLOAT32, STRING, ARRAY = 6, 8, 9


class GGUFError(ValueError):
    """An invalid or unsupported file; the message names the file and its invalid key or tensor."""


@dataclass(frozen=True)
class TensorInfo:
    """`shape` has the slowest dimension first; `start` is an offset from the beginning of the file."""

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
        """A metadata value, which must have the type `kind`, or the default if there is none."""
        value = self.metadata.get(key, default)
        if value is not default and type(value) is not kind:
            raise GGUFError(f"{self.file}: {key}={value!r:.80} should be {kind.__name__}; download the file again")
        return value


def read_header(file: str | Path) -> Header:
    file = Path(file)
    if not file.is_file():
        raise GGUFError(f"{file} is missing; check the path")
    size = file.stat().st_size
    if size < 24:
        raise GGUFError(f"{file} has {size} bytes, too few for a GGUF file; download it again")
    mapped_bytes = min(size, MAX_HEADER_BYTES)
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), mapped_bytes, access=mmap.ACCESS_READ) as content:
        cursor = Cursor(file, content)
        tensor_count, metadata_count = cursor.read_counts()
        metadata = cursor.read_metadata(metadata_count)
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 0 < alignment <= 1 << 16 or alignment & (alignment - 1):
            raise GGUFError(f"{file}: general.alignment={alignment!r:.80} must be a power of two, at most {1 << 16}")
        return Header(file, size, metadata, cursor.read_tensors(tensor_count, alignment))


class Cursor:
    """A position in the header, from which values are read in order."""

    def __init__(self, file: Path, content: mmap.mmap):
        self.file, self.content, self.position, self.string_count = file, content, 0, 0

    def read_counts(self) -> tuple[int, int]:
        """The number of tensors and the number of metadata entries."""
        if self.read_bytes(4, "magic") != b"GGUF":
            raise GGUFError(f"{self.file} is not a GGUF file: its first bytes are not GGUF; check the path")
        (version,) = self.unpack("I", "version")
        if version not in VERSIONS:
            hint = " (big-endian?)" if version & 0xFFFF == 0 else ""
            raise GGUFError(f"{self.file}: GGUF version {version}{hint} is not supported; use a file of version 2 or 3")
        counts = self.unpack("QQ", "counts")
        for count, noun in zip(counts, ("tensors", "metadata entries"), strict=True):
            if count > MAX_ENTRIES:
                raise GGUFError(f"{self.file} declares {count} {noun}; at most {MAX_ENTRIES} are read")
        return counts

    def read_metadata(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for n in range(count):
            key = self.read_string(f"the key of metadata entry {n}")
            if key in metadata:
                raise GGUFError(f"{self.file}: {key} occurs twice; download the file again")
            (type_id,) = self.unpack("I", key)
            metadata[key] = self.read_array(key) if type_id == ARRAY else self.read_value(type_id, key)
        return metadata

    def read_tensors(self, count: int, alignment: int) -> dict[str, TensorInfo]:
        tensors: dict[str, TensorInfo] = {}
        for n in range(count):
            name = self.read_string(f"the name of tensor {n}")
            (dims,) = self.unpack("I", name)
            if name in tensors or not 1 <= dims <= 4:
                fault = "occurs twice" if name in tensors else f"has {dims} dimensions; supported are 1 to 4"
                raise GGUFError(f"{self.file}: {name} {fault}")
            shape = self.unpack(f"{dims}Q", name)[::-1]  # stored with the fastest dimension first
            type_id, offset = self.unpack("IQ", name)
            if not all(shape) or offset % alignment:
                raise GGUFError(
                    f"{self.file}: {name} has shape {shape} and offset {offset}; sizes must be positive, offsets "
                    f"multiples of {alignment}"
                )
            tensors[name] = TensorInfo(shape, type_id, offset)
        data = -(-self.position // alignment) * alignment
        return {name: TensorInfo(info.shape, info.type, data + info.start) for name, info in tensors.items()}

    def read_value(self, type_id: int, key: str) -> Any:
        if type_id == STRING:
            return self.read_string(key)
        if type_id not in SCALARS:
            raise GGUFError(f"{self.file}: {key} has type {type_id}, which does not exist; download the file again")
        (value,) = self.unpack(SCALARS[type_id], key)
        return shortest_decimal(value) if type_id == FLOAT32 else value

    def read_array(self, key: str) -> Any:
        """A list of strings, or an `array` of numbers."""
        type_id, count = self.unpack("IQ", key)
        if type_id == STRING:
            self.string_count += count
            if self.string_count > MAX_STRINGS:
                raise GGUFError(f"{self.file}: {key} has {count} strings; at most {MAX_STRINGS} in all arrays are read")
            return self.read_strings(count, key)
        if type_id not in SCALARS:
            raise GGUFError(f"{self.file}: {key} is an array of type {type_id}; supported are numbers and strings")
        type_code = SCALARS[type_id].replace("?", "B")
        return array(type_code, self.read_bytes(count * struct.calcsize(f"<{type_code}"), key))

    def read_string(self, label: str) -> str:
        return self.read_strings(1, label)[0]

    def read_strings(self, count: int, label: str) -> list[str]:
        """The loop calls no method of this class: a file may have a million strings."""
        content, position, size, strings = self.content, self.position, len(self.content), []
        try:
            for _ in range(count):
                start = position + 8
                end = start + int.from_bytes(content[position:start], "little")
                if end > size:  # also if the length itself is cut off, since `start` is then past the end
                    self.position = position
                    (length,) = self.unpack("Q", label)
                    self.read_bytes(length, label)
                strings.append(content[start:end].decode("utf-8"))
                position = end
        except UnicodeDecodeError as error:
            raise GGUFError(f"{self.file}: {label} is not UTF-8 ({error.reason}); download the file again") from None
        self.position = position
        return strings

    def unpack(self, types: str, label: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{types}", self.read_bytes(struct.calcsize(f"<{types}"), label))

    def read_bytes(self, count: int, label: str) -> bytes:
        """The next `count` bytes; `label` names them in the error."""
        remaining = len(self.content) - self.position
        if count > remaining:
            raise GGUFError(
                f"{self.file}: {label} has {count} bytes, but only {remaining} are left; the file is damaged or "
                f"truncated, or its header is longer than {MAX_HEADER_BYTES} bytes"
            )
        self.position += count
        return self.content[self.position - count : self.position]


def shortest_decimal(value: float) -> float:
    """The number with the fewest digits that rounds to this float32: 1e-05 instead of 9.999999747378752e-06."""
    candidates = (float(f"{value:.{digits}g}") for digits in range(6, 10))
    return next((candidate for candidate in candidates if to_float32(candidate) == value), value)


def to_float32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]
