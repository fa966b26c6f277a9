"""The bytes of a GGUF file: the inverse of `regard.gguf_header`.

    "GGUF"  version  tensor count  metadata count | key type value … | name dims type offset … | padding | data

Tensors are written one after the other, each at a multiple of 32 bytes. The file gets its name when it is complete.
"""

import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from torch import Tensor

from regard.checkpoint.atomic_folder import sync_folder
from regard.gguf_header import ARRAY, DEFAULT_ALIGNMENT, FLOAT32, STRING

VERSION = 3
UINT32, INT32, BOOL = 4, 5, 7


class TensorToWrite(NamedTuple):
    """type: its id in the file. size: in bytes. make: the contiguous bytes, when they are written."""

    shape: tuple[int, ...]
    type: int
    size: int
    make: Callable[[], Tensor]


def write_file(file: Path, metadata: Mapping[str, Any], tensors: Mapping[str, TensorToWrite]) -> None:
    partial = file.with_name(f".{file.name}.partial")
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with partial.open("wb") as stream:
            stream.write(header_bytes(metadata, tensors))
            pad(stream)
            for tensor in tensors.values():
                content = tensor.make()
                assert content.nbytes == tensor.size, f"a tensor has {content.nbytes} bytes, declared are {tensor.size}"
                stream.write(content.numpy())
                pad(stream)
            stream.flush()
            os.fsync(stream.fileno())
        partial.rename(file)
        sync_folder(file.parent)
    finally:
        partial.unlink(missing_ok=True)


def pad(stream: BinaryIO) -> None:
    stream.write(bytes(-stream.tell() % DEFAULT_ALIGNMENT))


def header_bytes(metadata: Mapping[str, Any], tensors: Mapping[str, TensorToWrite]) -> bytes:
    parts = [b"GGUF", struct.pack("<IQQ", VERSION, len(tensors), len(metadata))]
    parts += [string_bytes(key) + typed_bytes(value) for key, value in metadata.items()]
    offset = 0
    for name, tensor in tensors.items():
        dims = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *reversed(tensor.shape))
        parts.append(string_bytes(name) + dims + struct.pack("<IQ", tensor.type, offset))
        offset += tensor.size + -tensor.size % DEFAULT_ALIGNMENT
    return b"".join(parts)


def typed_bytes(value: Any) -> bytes:
    """A metadata value after the id of its type; whole numbers of a list are signed, as in files of llama.cpp."""
    match value:
        case bool():
            return struct.pack("<I?", BOOL, value)
        case int():
            return struct.pack("<II", UINT32, value)
        case float():
            return struct.pack("<If", FLOAT32, value)
        case str():
            return struct.pack("<I", STRING) + string_bytes(value)
    values = list(value)
    if values and isinstance(values[0], str):
        return struct.pack("<IIQ", ARRAY, STRING, len(values)) + b"".join(map(string_bytes, values))
    type, code = (FLOAT32, "f") if values and isinstance(values[0], float) else (INT32, "i")
    return struct.pack(f"<IIQ{len(values)}{code}", ARRAY, type, len(values), *values)


def string_bytes(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded
