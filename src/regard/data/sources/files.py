"""Files of the user (data/readers.py: text, JSON, CSV, Parquet …), and the text of the Python manual."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from regard.data.readers import FileExamples, read_examples
from regard.data.sources.base import DataSource, Splits, open_collection
from regard.spec import require

FileFormat = Literal[
    "text", "lines", "paragraphs", "files", "jsonl", "json", "csv", "tsv", "parquet", "arrow", "dataset"
]  # fmt: skip


@dataclass(frozen=True)
class File(DataSource):
    """A file, a folder, or a pattern such as `corpus/**/*.md`. The fields of an example are those of the file."""

    path: str = ""
    pattern: str | None = None  # of the files of a folder; by default all with a suffix of one known format
    tail: bool = False  # hold out the last tenth, instead of a tenth that is selected by its content
    format: FileFormat | None = None  # by default that of the suffix
    columns: tuple[str, ...] = ()  # "text=content": the field `text` of the examples is the column `content`

    def check(self) -> None:
        super().check()
        require(bool(self.path), "file: path is missing; set data.path")
        for column in self.columns:
            require("=" in column, f"file: columns={column!r} must be FIELD=COLUMN, for example text=content")

    def open(self, seed: int = 0, hold_out: bool = True) -> Splits:
        return open_collection(f"{self.path}, seed {seed}", self.read(), seed, hold_out, self.tail)

    def read(self) -> FileExamples:
        path = Path(self.path) / self.pattern if self.pattern else self.path
        return read_examples(path, self.format, dict(column.split("=", 1) for column in self.columns))


@dataclass(frozen=True)
class Pydoc(DataSource):
    """The text of the Python manual that every Python installation contains."""

    def open(self, seed: int = 0, hold_out: bool = True) -> Splits:
        from pydoc_data.topics import topics

        documents = [{"text": topics[name]} for name in sorted(topics) if topics[name]]
        return open_collection(f"pydoc, seed {seed}", documents, seed, hold_out)
