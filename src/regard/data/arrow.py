"""Parquet files, Arrow files and folders of Hugging Face `datasets`, read by pyarrow (the extra `data`).

Arrow files are memory-mapped, so that opening them reads nothing and any row can be read without the others. Parquet is
compressed in groups of rows; it is first written as an Arrow file to the folder of temporary files, group by group. A
folder of `datasets.Dataset.save_to_disk` has Arrow files, and names them in `state.json`.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from regard.data.file_index import FileError
from regard.data.indexed_file import TemporaryCopy

DATASET_STATE, DATASET_SPLITS = "state.json", "dataset_dict.json"
FILE_MAGIC = b"ARROW1"  # of the file format; the stream format, which `datasets` writes, has none
COPY_ROWS = 1024  # rows per batch of a copied Parquet file


class ArrowFile:
    """The rows of an Arrow file in the file or stream format."""

    def __init__(self, path: Path, copy: TemporaryCopy | None = None):
        self.path, self.copy = path, copy
        self._map()

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, index: int) -> dict[str, Any]:
        batch = int(np.searchsorted(self._ends, index, side="right"))
        start = self._ends[batch - 1] if batch else 0
        return self._batches[batch].slice(int(index - start), 1).to_pylist()[0]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self._batches:
            for start in range(0, batch.num_rows, COPY_ROWS):
                yield from batch.slice(start, COPY_ROWS).to_pylist()

    def origin(self, index: int) -> str:
        return f"{self.path}, row {index}"

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "copy": self.copy}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map()

    def _map(self) -> None:
        arrow = import_pyarrow(self.path)
        stored = self.copy.path if self.copy else self.path
        try:
            with stored.open("rb") as stream:
                is_file = stream.read(len(FILE_MAGIC)) == FILE_MAGIC
            source = arrow.memory_map(str(stored))
            if is_file:
                reader = arrow.ipc.open_file(source)
                batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
            else:
                batches = list(arrow.ipc.open_stream(source))
        except (arrow.ArrowInvalid, OSError) as error:
            raise FileError(f"{self.path} is not a complete Arrow file ({error}); copy it again") from None
        self._batches = [batch for batch in batches if batch.num_rows]
        self._ends = np.cumsum([batch.num_rows for batch in self._batches])


def open_parquet(path: Path) -> ArrowFile:
    """The rows of a Parquet file, in an Arrow file that is deleted with the returned object."""
    import_pyarrow(path)
    return ArrowFile(path, TemporaryCopy(path, write_arrow))


def write_arrow(source: Path, stream: BinaryIO) -> None:
    """Write the rows of a Parquet file in Arrow's stream format."""
    arrow = import_pyarrow(source)
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(source) as file, arrow.ipc.new_stream(stream, file.schema_arrow) as writer:
            for batch in file.iter_batches(COPY_ROWS):
                writer.write_batch(batch)
    except (arrow.ArrowInvalid, OSError) as error:
        raise FileError(f"{source} is not a complete Parquet file ({error}); copy it again") from None


def dataset_files(folder: Path) -> list[Path]:
    """The Arrow files of a folder that `datasets` saved."""
    if (folder / DATASET_SPLITS).is_file():
        splits = [str(split) for split in _read(folder / DATASET_SPLITS).get("splits", [])]
        raise FileError(f"{folder} has the splits {', '.join(splits)}; choose one, for example {folder / splits[0]}")
    state = _read(folder / DATASET_STATE)
    if state.get("_indices_data_files"):
        raise FileError(f"{folder} selects rows by an index; save it again after flatten_indices()")
    try:
        return [folder / Path(file["filename"]).name for file in state["_data_files"]]
    except (KeyError, TypeError):
        raise FileError(f"{folder / DATASET_STATE} lists no files; save the dataset again") from None


def import_pyarrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError as error:
        raise FileError(f"{path} is read by pyarrow, which is not installed: pip install 'regard[data]'") from error
    return pyarrow


def _read(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FileError(f"{file} cannot be read ({error}); save the dataset again") from None
    return value if isinstance(value, dict) else {}
