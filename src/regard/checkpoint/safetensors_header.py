"""The header of a safetensors file, held against the file before a byte of weights is read.

    8 bytes: its length n        n bytes of JSON: {name: {dtype, shape, data_offsets: [from, to]}}        the weights

Every size is checked: tensors fill the rest of the file one after the other, without gaps, overlaps or a rest, and each
is as long as its dtype and shape say. Bytes are read straight into the memory that a tensor will own, in chunks side by
side, or cast chunk by chunk, so that a file that changes later does not change a running model. Or they are mapped,
if that is asked for and nothing is cast: then they are read when they are used.
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

from regard.checkpoint.folder import CheckpointError
from regard.weights.table import FLOATS, StoredTensor

Cast = Callable[[torch.dtype], torch.dtype]  # what a stored dtype becomes
LARGEST = 8 << 20  # bytes of a header: some fifty thousand tensors
CHUNK = 16 << 20
OTHERS = {  # dtypes that no model here reads, with their bits
    "BOOL": 8, "U8": 8, "I8": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64, "U64": 64, "C64": 64, "F4": 4,
    "F6_E2M3": 6, "F6_E3M2": 6, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
}  # fmt: skip
PIECE = 1 << 15  # numbers cast at once: torch spreads no more than that over threads of its own, and all are busy
LARGEST_SIZE = 1 << 62  # what is past it fits no file
MOST_SIDES, LONGEST_NAME = 8, 500


def tensors(path: Path, cast: Cast, mapped: bool = False) -> dict[str, StoredTensor]:
    """Every tensor of the file by name, unread."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > min(LARGEST, size - 8):
            refuse(path, f"its header should end within {min(LARGEST, max(size - 8, 0))} bytes, found {length}")
        header = parse(path, stream.read(length))
    found, spans = {}, []
    for name, entry in header.items():
        dtype, shape, (start, end) = fields(path, name, entry)
        stored = FLOATS.get(dtype)
        bits = 8 * stored.itemsize if stored else OTHERS.get(dtype)
        if bits is None:
            refuse(path, f"{name} has the dtype {dtype!r:.40}; known are {', '.join([*FLOATS, *OTHERS])}")
        wanted = math.prod(shape) * bits
        if 8 * (end - start) != wanted:
            refuse(path, f"{name} {shape} in {dtype} should have {wanted // 8} bytes, found {end - start}")
        spans.append((start, end, name))
        stored = stored or torch.uint8  # numbers that no model reads, a mask perhaps
        place = 8 + length + start
        maps = mapped and cast(stored) == stored and end > start and place % stored.itemsize == 0
        reader = (
            partial(map_, path, place, shape, stored)
            if maps
            else partial(read, path, place, shape, stored, cast(stored))
        )
        found[name] = StoredTensor(str(path), shape, dtype, reader)
    reached = 0
    for start, end, name in sorted(spans):
        if start != reached:
            refuse(path, f"{name} should begin at byte {reached}, where the tensor before it ends, found {start}")
        reached = end
    if reached != size - 8 - length:
        refuse(path, f"its tensors should have {reached} bytes, found {size - 8 - length}")
    return found


def parse(path: Path, text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        refuse(path, f"its header is not valid JSON: {error}", error)
    if not isinstance(header, dict):
        refuse(path, f"its header holds {type(header).__name__}, expected an object")
    about = header.pop("__metadata__", {})
    if not isinstance(about, dict) or not all(isinstance(value, str) for value in about.values()):
        refuse(path, f"its __metadata__ should hold texts, found {about!r:.80}")
    return header


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a name stands in it twice")
    return values


def fields(path: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    if len(name) > LONGEST_NAME:
        refuse(path, f"{name:.80}… should be a name of at most {LONGEST_NAME} letters, found {len(name)}")
    if isinstance(entry, dict) and isinstance(entry.get("dtype"), str):
        shape, offsets = sizes(entry.get("shape")), sizes(entry.get("data_offsets"))
        if shape is not None and offsets is not None and len(offsets) == 2 and offsets[0] <= offsets[1]:
            return entry["dtype"], shape, offsets
    refuse(path, f"{name} should have a dtype, a shape and data_offsets, found {entry!r:.120}")


def sizes(value: Any) -> tuple[int, ...] | None:
    """The list, if it is one of a few whole numbers that a file could have."""
    fits = isinstance(value, list) and len(value) <= MOST_SIDES
    return tuple(value) if fits and all(type(n) is int and 0 <= n < LARGEST_SIZE for n in value) else None


def refuse(path: Path, fault: str, cause: Exception | None = None) -> NoReturn:
    raise CheckpointError(f"{path} is damaged or no safetensors file ({fault}); fetch it again") from cause


def map_(path: Path, start: int, shape: tuple[int, ...], stored: torch.dtype) -> Tensor:
    """Pages of the file; those that are written to become memory of this process."""
    pages = numpy.memmap(path, numpy.uint8, "c", start, (math.prod(shape) * stored.itemsize,))
    with torch.inference_mode(False):
        return torch.from_numpy(pages).view(stored).view(shape)


def read(path: Path, start: int, shape: tuple[int, ...], stored: torch.dtype, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):  # a mode of this thread alone
        out = torch.empty(shape, dtype=dtype)
        parts = out.flatten().split(CHUNK // stored.itemsize)
    places = range(start, start + out.numel() * stored.itemsize, CHUNK)
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        list(threads.map(partial(fill, path, stored), parts, places))
    return out


def fill(path: Path, stored: torch.dtype, part: Tensor, place: int) -> None:
    """What the file holds from this place on, in a part's own dtype."""
    with path.open("rb", buffering=0) as stream:
        stream.seek(place)
        if part.dtype == stored:
            copy(stream, part)
        else:
            scratch = torch.empty(PIECE, dtype=stored)
            for piece in part.split(PIECE):
                piece.copy_(copy(stream, scratch[: len(piece)]))


def copy(stream: FileIO, into: Tensor) -> Tensor:
    rest = memoryview(into.view(torch.uint8).numpy())
    while rest:
        count = stream.readinto(rest)
        if not count:
            refuse(Path(stream.name), "it was cut short while it was read")
        rest = rest[count:]
    return into
