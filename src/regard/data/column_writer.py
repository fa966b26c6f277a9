"""Write a column of a shard: the values of its examples, and their offsets (shards.py).

Values are stored in the smallest dtype that holds them: token ids of a vocabulary up to 65,536 as uint16. A float32
column with at most 256 distinct values, such as the weights of tokens, is stored as uint8 codes with a table of the
values. If a value does not fit, the file is converted once and writing goes on, so the files depend on the values only.
"""

import os
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from regard.data.shards import CHECKSUM, OFFSET, new_checksum

WRITE_BYTES = 1 << 20
MAX_CODES = 256
UNSIGNED, SIGNED = ("uint8", "uint16", "uint32", "int64"), ("int8", "int16", "int32", "int64")


class ColumnWriter:
    """Append the arrays of a column to its file. `rows` examples before the first one have no such column."""

    def __init__(self, folder: Path, name: str, rows: int = 0):
        self.folder, self.name, self.optional = folder, name, rows > 0
        self.offsets = array("q", [0] * (rows + 1))
        self.returned: np.dtype | None = None  # the dtype of the arrays; None: all were empty
        self.stored = np.dtype("uint8")
        self.low = self.high = 0
        self.table: dict[int, int] | None = None  # bits of a value: its code
        self._start_file()

    def append(self, values: Any) -> int:
        """Returns the number of values."""
        values = np.asarray(values)
        if values.ndim != 1:
            raise ValueError(f"the column {self.name!r} has the shape {values.shape}; arrays need one dimension")
        if values.size:
            self._check_dtype(values.dtype)
            self._write(self._compact(values))
        self.offsets.append(self.offsets[-1] + len(values))
        return len(values)

    def skip(self) -> None:
        """An example without this column."""
        self.optional = True
        self.offsets.append(self.offsets[-1])

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
            f"{self.name}.bin": {"bytes": self.bytes, CHECKSUM: self.checksum.hexdigest()},
            f"{self.name}.idx": {"bytes": len(offsets), CHECKSUM: new_checksum(offsets).hexdigest()},
        }

    def description(self) -> dict[str, Any]:
        table = {} if self.table is None else {"table": self._table_values().tolist()}
        return {"dtype": self.stored.name, "optional": self.optional, **table}

    def _check_dtype(self, dtype: np.dtype) -> None:
        if self.returned is None:
            if dtype.kind not in "biuf" or dtype in ("float16", "uint64", "longdouble"):
                raise ValueError(f"the column {self.name!r} has the dtype {dtype.name}; use integers or float32")
            self.returned = dtype
            if dtype.kind == "f":
                self.table = {} if dtype == "float32" else None
                self.stored = np.dtype("uint8" if dtype == "float32" else "<f8")
        elif dtype != self.returned:
            raise ValueError(
                f"the column {self.name!r} is {dtype.name} here and {self.returned.name} in other examples"
            )

    def _compact(self, values: np.ndarray) -> np.ndarray:
        """The values as they are stored; the file is converted if they do not fit."""
        if self.table is not None:
            return self._codes(values)
        if values.dtype.kind != "f":
            self.low, self.high = min(self.low, int(values.min())), max(self.high, int(values.max()))
            needed = smallest_dtype(self.low, self.high)
            if needed != self.stored:
                self._convert(needed, lambda stored: stored)
        return values.astype(self.stored)

    def _codes(self, values: np.ndarray) -> np.ndarray:
        """The codes of float32 values; if there are too many distinct ones, the values."""
        assert self.table is not None
        distinct, inverse = np.unique(values.astype("<f4").view("<u4"), return_inverse=True)
        new = [bits for bits in distinct.tolist() if bits not in self.table]
        if len(self.table) + len(new) > MAX_CODES:
            table = self._table_values()
            self.table = None
            self._convert(np.dtype("<f4"), lambda codes: table[codes])
            return values.astype("<f4")
        self.table.update({bits: len(self.table) + number for number, bits in enumerate(new)})
        return np.array([self.table[bits] for bits in distinct.tolist()], np.uint8)[inverse]

    def _table_values(self) -> np.ndarray:
        return np.array(list(self.table or ()), "<u4").view("<f4")

    def _convert(self, dtype: np.dtype, values_of: Callable[[np.ndarray], np.ndarray]) -> None:
        """Convert the values that were written so far to another dtype."""
        self.stream.close()
        file, narrow = self.folder / f"{self.name}.bin", self.folder / f"{self.name}.narrow"
        file.rename(narrow)
        previous, self.stored = self.stored, dtype
        self._start_file()
        with narrow.open("rb") as stream:
            while block := stream.read(WRITE_BYTES):
                self._write(values_of(np.frombuffer(block, previous)).astype(dtype))
        narrow.unlink()

    def _start_file(self) -> None:
        self.checksum, self.bytes = new_checksum(), 0
        self.stream = (self.folder / f"{self.name}.bin").open("wb", buffering=WRITE_BYTES)

    def _write(self, values: np.ndarray) -> None:
        data = values.tobytes()
        self.stream.write(data)
        self.checksum.update(data)
        self.bytes += len(data)


def smallest_dtype(low: int, high: int) -> np.dtype:
    """The smallest little-endian integer dtype for values from `low` to `high`."""
    limits = {name: np.iinfo(name) for name in (SIGNED if low < 0 else UNSIGNED)}
    name = next(name for name, limit in limits.items() if limit.min <= low and high <= limit.max)
    return np.dtype(name).newbyteorder("<")
