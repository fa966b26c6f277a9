"""Tensors of a safetensors file: the header is checked against the file before any weights are read.

    8 bytes: header length n        n bytes of JSON: {name: {dtype, shape, data_offsets: [start, end]}}        data

Tensors must fill the data section in order, without gaps, overlaps or trailing bytes, and each must have the number of
bytes that its dtype and shape require. A tensor is read in parallel chunks into newly allocated memory, cast if
needed, so a file that changes later does not change the model. With `mmap`, a tensor that needs no cast is
memory-mapped instead, and its bytes are read on first use.
"""

import json
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, NoReturn

import numpy
import torch
from torch import Tensor

from regard.checkpoint.atomic_folder import CheckpointError
from regard.weights.table import FLOATS, StoredTensor

Cast = Callable[[torch.dtype], torch.dtype]  # stored dtype -> dtype in memory
CODES = {  # of quantized weights; never cast
    "U8": torch.uint8, "I8": torch.int8, "I32": torch.int32, "I64": torch.int64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
OTHER_DTYPES = {  # dtypes that no model here uses, with their bits
    "BOOL": 8, "I16": 16, "U16": 16, "U32": 32, "U64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
}  # fmt: skip
MAX_HEADER_BYTES = 8 << 20  # about fifty thousand tensors
MAX_SIZE = 1 << 62
MAX_DIMS, MAX_NAME_CHARACTERS = 8, 500
CHUNK_BYTES = 16 << 20
CAST_NUMEL = 1 << 15  # torch parallelizes larger copies, but all threads are busy with chunks already


def open_tensors(path: Path, cast: Cast, mmap: bool = False) -> dict[str, StoredTensor]:
    """All tensors of the file by name; only the header is read."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        limit = min(MAX_HEADER_BYTES, size - 8)
        if length > limit:
            refuse(path, f"its header should have at most {max(limit, 0)} bytes, found {length}")
        header = parse_header(path, stream.read(length))
    found, spans = {}, []
    for name, entry in header.items():
        dtype, shape, (start, end) = parse_entry(path, name, entry)
        stored = FLOATS.get(dtype, CODES.get(dtype))
        bits = 8 * stored.itemsize if stored else OTHER_DTYPES.get(dtype)
        if bits is None:
            known = ", ".join([*FLOATS, *CODES, *OTHER_DTYPES])
            refuse(path, f"{name} has the dtype {dtype!r:.40}; the known dtypes are {known}")
        expected = math.prod(shape) * bits
        if 8 * (end - start) != expected:
            refuse(path, f"{name} {shape} in {dtype} should have {expected // 8} bytes, found {end - start}")
        spans.append((start, end, name))
        stored = stored or torch.uint8  # a tensor that no model uses, such as a mask
        offset = 8 + length + start
        aligned = end > start and offset % stored.itemsize == 0
        in_memory = cast(stored) if dtype in FLOATS else stored
        if mmap and aligned and in_memory == stored:
            read = partial(map_tensor, path, offset, shape, stored)
        else:
            read = partial(read_tensor, path, offset, shape, stored, in_memory)
        found[name] = StoredTensor(str(path), shape, dtype, read)
    previous_end = 0
    for start, end, name in sorted(spans):
        if start != previous_end:
            refuse(path, f"{name} should start at byte {previous_end}, the end of the previous tensor, found {start}")
        previous_end = end
    if previous_end != size - 8 - length:
        refuse(path, f"its tensors should have {previous_end} bytes, found {size - 8 - length}")
    return found


def parse_header(path: Path, content: bytes) -> dict[str, Any]:
    try:
        header = json.loads(content.decode("utf-8"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        refuse(path, f"its header is not valid JSON: {error}", error)
    if not isinstance(header, dict):
        refuse(path, f"its header holds {type(header).__name__}, expected an object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        refuse(path, f"its __metadata__ should hold strings, found {metadata!r:.80}")
    return header


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a name occurs twice")
    return values


def parse_entry(path: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """The dtype, shape and data offsets of a tensor."""
    if len(name) > MAX_NAME_CHARACTERS:
        refuse(path, f"{name:.80}… should have at most {MAX_NAME_CHARACTERS} characters, found {len(name)}")
    if isinstance(entry, dict) and isinstance(entry.get("dtype"), str):
        shape, offsets = parse_sizes(entry.get("shape")), parse_sizes(entry.get("data_offsets"))
        if shape is not None and offsets is not None and len(offsets) == 2 and offsets[0] <= offsets[1]:
            return entry["dtype"], shape, offsets
    refuse(path, f"{name} should have a dtype, a shape and data_offsets, found {entry!r:.120}")


def parse_sizes(value: Any) -> tuple[int, ...] | None:
    """The value as a tuple, if it is a short list of integers that could be sizes in a file."""
    short = isinstance(value, list) and len(value) <= MAX_DIMS
    return tuple(value) if short and all(type(n) is int and 0 <= n < MAX_SIZE for n in value) else None


def refuse(path: Path, fault: str, cause: Exception | None = None) -> NoReturn:
    raise CheckpointError(f"{path} is damaged or not a safetensors file ({fault}); download it again") from cause


def map_tensor(path: Path, offset: int, shape: tuple[int, ...], stored: torch.dtype) -> Tensor:
    """A memory map of the file, copy-on-write: writing to the tensor does not change the file."""
    pages = numpy.memmap(path, numpy.uint8, "c", offset, (math.prod(shape) * stored.itemsize,))
    with torch.inference_mode(False):
        return torch.from_numpy(pages).view(stored).view(shape)


def read_tensor(path: Path, offset: int, shape: tuple[int, ...], stored: torch.dtype, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):  # the mode is per thread; the threads below never set it
        out = torch.empty(shape, dtype=dtype)
        chunks = out.flatten().split(CHUNK_BYTES // stored.itemsize)
    offsets = range(offset, offset + out.numel() * stored.itemsize, CHUNK_BYTES)
    if len(offsets) == 1:  # starting a thread takes longer than reading a small tensor
        read_chunk(path, stored, chunks[0], offset)
        return out
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        list(threads.map(partial(read_chunk, path, stored), chunks, offsets))
    return out


def read_chunk(path: Path, stored: torch.dtype, chunk: Tensor, offset: int) -> None:
    """Fill the chunk from the file, cast to the chunk's dtype."""
    with path.open("rb", buffering=0) as stream:
        stream.seek(offset)
        if chunk.dtype == stored:
            read_into(stream, chunk)
        else:
            buffer = torch.empty(CAST_NUMEL, dtype=stored)
            for part in chunk.split(CAST_NUMEL):
                part.copy_(read_into(stream, buffer[: len(part)]))


def read_into(stream: FileIO, tensor: Tensor) -> Tensor:
    remaining = memoryview(tensor.view(torch.uint8).numpy())
    while remaining:
        count = stream.readinto(remaining)
        if not count:
            refuse(Path(stream.name), "it was truncated while it was read")
        remaining = remaining[count:]
    return tensor
