"""Write a column of a shard: the values of its examples, and their offsets (shards.py).

A float32 column with at most 256 distinct values per shard, such as the weights of tokens, is stored as uint8 codes
with a table of the values. If there are more, the codes that were written are replaced by their values.
"""

import os
from array import array
from pathlib import Path
from typing import Any

import numpy as np

from regard.data.shards import CHECKSUM, OFFSET, new_checksum

WRITE_BYTES = 1 << 20
MAX_CODES = 256


class ColumnWriter:
    """Append the arrays of a column to its file."""

    def __init__(self, folder: Path, name: str, dtype: str):
        self.folder, self.name, self.dtype = folder, name, np.dtype(dtype).newbyteorder("<")
        self.table: dict[int, int] | None = {} if dtype == "float32" else None  # bits of a value: its code
        self.offsets = array("q", [0])
        self._start_file()

    def append(self, values: Any) -> int:
        """Returns the number of values."""
        converted = self.convert(np.asarray(values))
        self._write(converted if self.table is None else self._codes(converted))
        self.offsets.append(self.offsets[-1] + len(converted))
        return len(converted)

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
            f"{self.name}.bin": {"bytes": self.bytes, CHECKSUM: self.checksum.hexdigest()},
            f"{self.name}.idx": {"bytes": len(offsets), CHECKSUM: new_checksum(offsets).hexdigest()},
        }

    @property
    def table_values(self) -> list[float] | None:
        """The values of the codes, or None if values are stored."""
        return None if self.table is None else np.array(list(self.table), "<u4").view("<f4").tolist()

    def _start_file(self) -> None:
        self.checksum, self.bytes = new_checksum(), 0
        self.stream = (self.folder / f"{self.name}.bin").open("wb", buffering=WRITE_BYTES)

    def _write(self, values: np.ndarray) -> None:
        data = values.tobytes()
        self.stream.write(data)
        self.checksum.update(data)
        self.bytes += len(data)

    def _codes(self, values: np.ndarray) -> np.ndarray:
        """The codes of values; if there are too many distinct ones, the values."""
        assert self.table is not None
        distinct, inverse = np.unique(values.view("<u4"), return_inverse=True)
        codes = [self.table.setdefault(bits, len(self.table)) for bits in distinct.tolist()]
        if len(self.table) <= MAX_CODES:
            return np.array(codes, np.uint8)[inverse]
        self._store_values()
        return values

    def _store_values(self) -> None:
        """Replace the codes that were written by their values."""
        table = np.array(self.table_values, "<f4")
        self.stream.close()
        written, codes = self.folder / f"{self.name}.bin", self.folder / f"{self.name}.codes"
        written.rename(codes)
        self.table = None
        self._start_file()
        with codes.open("rb") as stream:
            while block := stream.read(WRITE_BYTES):
                self._write(table[np.frombuffer(block, np.uint8)])
        codes.unlink()
