"""Prepared examples: columns of arrays of any lengths, in memory-mapped shards.

    prepared.json             counts, fingerprints, columns and the size and checksum of every file
    shard-00000/tokens.bin    the values of all examples, one after another, little-endian
    shard-00000/tokens.idx    n + 1 offsets (int64): example i has the values from offsets[i] to offsets[i + 1]
    shard-00000/shard.json    the entry of prepared.json for this shard, and the settings that it was written with

A column that some examples of a shard lack is optional there: they have empty arrays in the files, and empty arrays are
left out when an example is read. Examples keep the order of their source, and all shards but the last have the same
number of them. `prepare` (prepare.py) writes such a folder. Opening it checks the sizes of all files; `verify` also
compares their checksums.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np

PREPARED, SHARD = "prepared.json", "shard.json"
VERSION = 1
OFFSET = np.dtype("<i8")
CHECKSUM = "blake2b"


class PreparedError(ValueError):
    """A folder that is not, or not completely, what `prepare` wrote; the message names the file and its fault."""


class ShardedExamples(Sequence[Mapping[str, np.ndarray]]):
    """The examples of a prepared folder. Arrays are read-only views of the files, unless they are stored as codes.

    tokens: the number of values in the columns that hold token ids. fingerprints: of the source, the tokenizer and the
    objective. Integers have the smallest dtype that holds them. An object can be pickled, and many processes can read
    the same folder.
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
        self.fingerprints: dict[str, str] = description["fingerprints"]
        self.fingerprint: str = description[CHECKSUM]
        self.tokens: int = description["tokens"]
        self.shards: list[dict[str, Any]] = description["shards"]
        self._length: int = description["examples"]
        self._per_shard: int = description["examples_per_shard"]
        self._open: dict[int, dict[str, _Column]] = {}
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
        example = {name: column[row] for name, column in arrays.items()}
        return {name: values for name, values in example.items() if len(values) or not arrays[name].optional}

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return (self[index] for index in range(len(self)))

    def lengths(self, column: str) -> np.ndarray:
        """The number of values of every example in a column."""
        shards = [self._open.get(number) or self._map(number) for number in range(len(self.shards))]
        return np.concatenate(
            [
                np.diff(columns[column].offsets) if column in columns else np.zeros(shard["examples"], np.int64)
                for columns, shard in zip(shards, self.shards, strict=True)
            ]
        )

    @property
    def bytes(self) -> int:
        return sum(entry["bytes"] for shard in self.shards for entry in shard["files"].values())

    def verify(self) -> None:
        """Read all files and compare their checksums; raises PreparedError at the first difference."""
        for shard in self.shards:
            check_sums(self.folder / shard["name"], shard["files"])

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": {}}  # a memory map cannot be pickled; the other process opens its own

    def _map(self, number: int) -> "dict[str, _Column]":
        shard = self.shards[number]
        folder = self.folder / shard["name"]
        columns = {}
        for name, entry in shard["columns"].items():
            column = _Column(
                map_file(folder / f"{name}.bin", np.dtype(entry["dtype"]).newbyteorder("<")),
                map_file(folder / f"{name}.idx", OFFSET),
                np.array(entry["table"], np.float32) if "table" in entry else None,
                entry["optional"],
            )
            if not column.is_consistent(shard["examples"]):
                raise damaged(folder / f"{name}.idx", "its offsets do not fit the values")
            columns[name] = column
        self._open[number] = columns
        return columns


@dataclass(frozen=True)
class _Column:
    """The mapped files of a column of a shard. With a table, the values are codes."""

    values: np.ndarray
    offsets: np.ndarray
    table: np.ndarray | None
    optional: bool

    def __getitem__(self, row: int) -> np.ndarray:
        values = self.values[self.offsets[row] : self.offsets[row + 1]]
        return values if self.table is None else self.table[values]

    def is_consistent(self, examples: int) -> bool:
        offsets = self.offsets
        ends_fit = len(offsets) == examples + 1 and offsets[0] == 0 and offsets[-1] == len(self.values)
        return bool(ends_fit and (np.diff(offsets) >= 0).all())


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


def new_checksum(data: bytes = b"") -> hashlib.blake2b:
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
