"""Prepared examples: columns of arrays of any lengths, in memory-mapped shards.

    prepared.json             columns and their dtypes, counts, fingerprints, and the size and checksum of every file
    shard-00000/tokens.bin    the values of all examples, one after another, little-endian
    shard-00000/tokens.idx    n + 1 offsets (int64): example i has the values from offsets[i] to offsets[i + 1]
    shard-00000/shard.json    the entry of prepared.json for this shard, and the settings that it was written with

`prepare` (prepare.py) writes such a folder. Opening it checks the sizes of all files; `verify` reads them and compares
their checksums. Examples keep the order of their source, and all shards but the last have the same number of them.
"""

import hashlib
import json
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

PREPARED, SHARD = "prepared.json", "shard.json"
VERSION = 1
DTYPES = ("bool", "uint8", "uint16", "uint32", "int8", "int16", "int32", "int64", "float32", "float64")
OFFSET = np.dtype("<i8")
CHECKSUM = "blake2b"
WRITE_BYTES = 1 << 20


class PreparedError(ValueError):
    """A folder that is not, or not completely, what `prepare` wrote; the message names the file and its fault."""


def id_dtype(vocab: int) -> str:
    """The smallest dtype of token ids."""
    return "uint16" if vocab <= 1 << 16 else "uint32"


class ShardedExamples(Sequence[Mapping[str, np.ndarray]]):
    """The examples of a prepared folder. Arrays are read-only views of the files; nothing is copied.

    columns: {name: dtype}. tokens: the number of values in the columns that hold token ids. fingerprints: of the
    source, the tokenizer and the objective. An object can be pickled, and many processes can read the same folder.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        if not (self.folder / PREPARED).is_file():
            raise PreparedError(
                f"{self.folder} has no {PREPARED}: it is not prepared, or not completely; run regard data prepare"
            )
        description = read_checked(self.folder / PREPARED)
        if description["version"] != VERSION:
            raise PreparedError(
                f"{self.folder} has version {description['version']} of the format, and this program reads version "
                f"{VERSION}; prepare the data again"
            )
        self.columns: dict[str, str] = description["columns"]
        self.fingerprints: dict[str, str] = description["fingerprints"]
        self.fingerprint: str = description[CHECKSUM]
        self.tokens: int = description["tokens"]
        self.shards: list[dict[str, Any]] = description["shards"]
        self._length: int = description["examples"]
        self._per_shard: int = description["examples_per_shard"]
        self._open: dict[int, dict[str, tuple[np.ndarray, np.ndarray]]] = {}
        for shard in self.shards:
            check_sizes(self.folder / shard["name"], shard["files"])

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> dict[str, np.ndarray]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, np.ndarray]]: ...
    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = index + len(self) if index < 0 else index
        if not 0 <= index < len(self):
            raise IndexError(f"{self.folder} has {len(self)} examples; there is none with index {index}")
        number, row = divmod(index, self._per_shard)
        arrays = self._open.get(number) or self._map(number)
        return {name: values[offsets[row] : offsets[row + 1]] for name, (values, offsets) in arrays.items()}

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return (self[index] for index in range(len(self)))

    def lengths(self, column: str) -> np.ndarray:
        """The number of values of every example in a column."""
        shards = [self._open.get(number) or self._map(number) for number in range(len(self.shards))]
        return np.concatenate([np.diff(arrays[column][1]) for arrays in shards])

    @property
    def bytes(self) -> int:
        return sum(entry["bytes"] for shard in self.shards for entry in shard["files"].values())

    def verify(self) -> None:
        """Read all files and compare their checksums; raises PreparedError at the first difference."""
        for shard in self.shards:
            check_sums(self.folder / shard["name"], shard["files"])

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": {}}  # a memory map cannot be pickled; the other process opens its own

    def _map(self, number: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        folder = self.folder / self.shards[number]["name"]
        arrays = {}
        for name, dtype in self.columns.items():
            values = map_file(folder / f"{name}.bin", np.dtype(dtype).newbyteorder("<"))
            offsets = map_file(folder / f"{name}.idx", OFFSET)
            consistent = len(offsets) == self.shards[number]["examples"] + 1 and offsets[-1] == len(values)
            if not consistent or offsets[0] or (np.diff(offsets) < 0).any():
                raise damaged(folder / f"{name}.idx", "its offsets do not fit the values")
            arrays[name] = (values, offsets)
        self._open[number] = arrays
        return arrays


class ColumnWriter:
    """Append the arrays of a column to its file."""

    def __init__(self, folder: Path, name: str, dtype: str):
        self.folder, self.name, self.dtype = folder, name, np.dtype(dtype).newbyteorder("<")
        self.offsets, self.checksum = array("q", [0]), new_checksum()
        self.stream = (folder / f"{name}.bin").open("wb", buffering=WRITE_BYTES)

    def append(self, values: Any) -> int:
        """Returns the number of values."""
        data = self.convert(np.asarray(values)).tobytes()
        self.stream.write(data)
        self.checksum.update(data)
        self.offsets.append(self.offsets[-1] + len(data) // self.dtype.itemsize)
        return self.offsets[-1] - self.offsets[-2]

    def convert(self, values: np.ndarray) -> np.ndarray:
        if values.ndim != 1:
            raise ValueError(
                f"the column {self.name!r} has the shape {values.shape}; an array of one dimension is needed"
            )
        if values.dtype == self.dtype or not values.size:
            return values.astype(self.dtype, copy=False)
        if values.dtype.kind in "iub" and self.dtype.kind in "iu":
            limits = np.iinfo(self.dtype)
            if int(values.min()) < limits.min or int(values.max()) > limits.max:
                raise ValueError(
                    f"the column {self.name!r} has values from {values.min()} to {values.max()}, outside of "
                    f"{self.dtype.name}; choose a larger dtype"
                )
        elif not (values.dtype.kind in "iubf" and self.dtype.kind == "f"):
            raise ValueError(f"the column {self.name!r} is {values.dtype}, not {self.dtype.name}")
        return values.astype(self.dtype)

    def close(self) -> dict[str, dict[str, Any]]:
        """Sync the files to disk; returns their sizes and checksums."""
        offsets = np.frombuffer(self.offsets, dtype=np.int64).astype(OFFSET).tobytes()
        with self.stream as stream:
            stream.flush()
            os.fsync(stream.fileno())
        with (self.folder / f"{self.name}.idx").open("wb") as stream:
            stream.write(offsets)
            stream.flush()
            os.fsync(stream.fileno())
        return {
            f"{self.name}.bin": {"bytes": self.offsets[-1] * self.dtype.itemsize, CHECKSUM: self.checksum.hexdigest()},
            f"{self.name}.idx": {"bytes": len(offsets), CHECKSUM: new_checksum(offsets).hexdigest()},
        }


def map_file(path: Path, dtype: np.dtype) -> np.ndarray:
    if not path.stat().st_size:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    return np.asarray(np.memmap(path, dtype, mode="r"))  # slices of a plain view are cheaper than those of a memmap


def check_sizes(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    for name, entry in files.items():
        file = folder / name
        if not file.is_file():
            raise damaged(file, "it is missing")
        size = file.stat().st_size
        if size != entry["bytes"]:
            raise damaged(file, f"it has {size} bytes instead of {entry['bytes']}")


def check_sums(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    check_sizes(folder, files)
    for name, entry in files.items():
        with (folder / name).open("rb") as stream:
            if hashlib.file_digest(stream, new_checksum).hexdigest() != entry[CHECKSUM]:
                raise damaged(folder / name, "its checksum differs")


def damaged(file: Path, fault: str) -> PreparedError:
    return PreparedError(f"{file} is damaged: {fault}; run regard data prepare again, which keeps the other shards")


def new_checksum(data: bytes = b"") -> "hashlib._Hash":
    return hashlib.blake2b(data, digest_size=16)


def read_checked(file: Path) -> dict[str, Any]:
    """The object in a file of `write_checked`, with its checksum."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
        stored = value[CHECKSUM]
        content = {key: entry for key, entry in value.items() if key != CHECKSUM}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(file, f"it cannot be read ({type(error).__name__})") from None
    if stored != object_checksum(content):
        raise damaged(file, "its checksum differs")
    return value


def write_checked(file: Path, value: Mapping[str, Any]) -> None:
    """Write an object as JSON, with a checksum, completely or not at all."""
    partial = file.with_name(f".{file.name}.partial")
    with partial.open("w", encoding="utf-8") as stream:
        json.dump({**value, CHECKSUM: object_checksum(value)}, stream, indent=1)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())
    partial.rename(file)
    sync_names(file.parent)


def object_checksum(value: Mapping[str, Any]) -> str:
    return new_checksum(json.dumps(value, sort_keys=True).encode()).hexdigest()


def sync_names(folder: Path) -> None:
    """Sync the names of the files in a folder to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
