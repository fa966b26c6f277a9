"""Examples from files: text, JSON Lines, JSON arrays, CSV, Parquet, and folders of Hugging Face `datasets`.

An example is a mapping of named values, as in a line of JSON Lines; those of text files have the field `text`.
`read_examples` opens a file, a folder or a pattern as a sequence. Only the offsets of the examples are in memory, and
each example is read when it is needed. A collection can be pickled and read in many processes. Conversations in other
formats become `messages`:

    ShareGPT    {"conversations": [{"from": "human", "value": …}, {"from": "gpt", "value": …}]}
    Alpaca      {"instruction": …, "input": …, "output": …}      `input` may be missing or empty

| format                | examples                                                                          |
| --------------------- | --------------------------------------------------------------------------------- |
| text                  | chunks that end at ends of lines, with `end = false`; small ones of a small file  |
| lines, paragraphs     | the lines of a text; groups of lines that are separated by blank lines            |
| files                 | each text file is one example; the default for folders of text                    |
| jsonl, json           | one object per line; an array of objects                                          |
| csv, tsv              | records with the names in the first one                                           |
| parquet, arrow        | rows, with pyarrow (arrow.py)                                                     |
| dataset               | a folder of `datasets.Dataset.save_to_disk`, with pyarrow                         |
"""

import glob
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Protocol, overload

import numpy as np

from regard.data.arrow import DATASET_SPLITS, DATASET_STATE, ArrowFile, dataset_files, open_parquet
from regard.data.file_index import FileError
from regard.data.indexed_file import IndexedFile
from regard.spec import suggest_name

SUFFIXES = {
    ".txt": "text", ".text": "text", ".md": "text", ".rst": "text",
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "tsv",
    ".parquet": "parquet", ".arrow": "arrow",
}  # fmt: skip
TEXT_FORMATS = ("text", "lines", "paragraphs", "files")
FORMATS = (*TEXT_FORMATS, "jsonl", "json", "csv", "tsv", "parquet", "arrow", "dataset")
HASHED_BYTES = 4 << 30  # of larger files, only size, modification time and samples are in the fingerprint
SAMPLES, SAMPLE_BYTES = 64, 1 << 20
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant"}  # others keep their names
OWN_FIELDS = ("messages", "prompt", "text")


class ExampleFile(Protocol):
    """The examples of one file."""

    path: Path

    def __len__(self) -> int: ...

    def read(self, index: int) -> dict[str, Any]: ...

    def __iter__(self) -> Iterator[dict[str, Any]]: ...

    def origin(self, index: int) -> str:
        """The file and the line or row, for errors."""
        ...


class FileExamples(Sequence[Mapping[str, Any]]):
    """The examples of one or more files, in order, read when they are needed.

    columns: {field of the examples: its name in the files}; fields that are not listed keep their names.
    """

    def __init__(self, name: str, format: str, files: Sequence[ExampleFile], columns: Mapping[str, str] | None = None):
        self.name, self.format, self.files, self.columns = name, format, list(files), dict(columns or {})
        self._ends = np.cumsum([len(file) for file in self.files])
        if not len(self):
            raise FileError(f"{name} is empty; give a file with at least one example")
        self[0]  # a wrong format or column is reported at once

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        file, row = self._locate(index)
        return self._convert(file.read(row), file, row)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for file in self.files:
            for row, example in enumerate(file):
                yield self._convert(example, file, row)

    def origin(self, index: int) -> str:
        """The file and the line or row of an example, for errors."""
        file, row = self._locate(index)
        return file.origin(row)

    @property
    def fingerprint(self) -> str:
        """A hash of format, columns and contents; of a file over 4 GiB: size, modification time and 64 samples."""
        digest = new_hash(json.dumps([self.format, sorted(self.columns.items())]).encode())
        for file in self.files:
            digest.update(fingerprint_file(file.path))
        return digest.hexdigest()

    def _locate(self, index: int) -> tuple[ExampleFile, int]:
        index = index + len(self) if index < 0 else index
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name} has {len(self)} examples; there is none with index {index}")
        number = int(np.searchsorted(self._ends, index, side="right"))
        return self.files[number], int(index - (self._ends[number - 1] if number else 0))

    def _convert(self, example: dict[str, Any], file: ExampleFile, row: int) -> dict[str, Any]:
        return with_messages(self._rename(example, file, row) if self.columns else example)

    def _rename(self, example: dict[str, Any], file: ExampleFile, row: int) -> dict[str, Any]:
        for name in self.columns.values():
            if name not in example:
                raise FileError(
                    f"{file.origin(row)}: no column {name!r}; it has {', '.join(example) or 'none'}; "
                    f"{suggest_name(name, example)}"
                )
        renamed = set(self.columns.values())
        kept = {name: value for name, value in example.items() if name not in renamed}
        return kept | {field: example[name] for field, name in self.columns.items()}


def read_examples(
    path: str | Path, format: str | None = None, columns: Mapping[str, str] | None = None
) -> FileExamples:
    """Open a file, a folder or a pattern such as `corpus/**/*.md`.

    format: one of `FORMATS`; by default it is chosen by the suffix or the content of the folder.
    columns: {field of the examples: its name in the files}, for example {"text": "content"}.
    """
    if format is not None and format not in FORMATS:
        raise ValueError(f"format={format!r} is not a format of files; {suggest_name(format, FORMATS)}")
    files, format = find_files(Path(path), format)
    return FileExamples(str(path), format, [open_file(file, format) for file in files], columns)


def open_file(path: Path, format: str) -> ExampleFile:
    if format == "parquet":
        return open_parquet(path)
    if format in ("arrow", "dataset"):
        return ArrowFile(path)
    return IndexedFile(path, format)


def find_files(path: Path, format: str | None = None) -> tuple[list[Path], str]:
    """The files of a path, in the order of their names, and their format."""
    if path.is_dir():
        return find_in_folder(path, format)
    if path.is_file():
        if format == "dataset":
            raise FileError(f"{path} is a file, and format='dataset' reads folders; use format='arrow'")
        return [path], format or format_of(path) or "text"
    if not glob.has_magic(str(path)):
        siblings = [file.name for file in path.parent.iterdir() if file != path] if path.parent.is_dir() else []
        similar = get_close_matches(path.name, siblings, 1)
        hint = f"did you mean {path.parent / similar[0]}?" if similar else "check the path"
        raise FileNotFoundError(f"{path} is not a file or folder; {hint}")
    files = sorted(file for file in map(Path, glob.glob(str(path), recursive=True)) if file.is_file())
    if not files:
        raise FileNotFoundError(f"no file matches {path}; check the pattern, and quote it in a shell")
    return files, format or common_format(path, files)


def find_in_folder(folder: Path, format: str | None) -> tuple[list[Path], str]:
    is_dataset = (folder / DATASET_STATE).is_file() or (folder / DATASET_SPLITS).is_file()
    if format == "dataset" or (format is None and is_dataset):
        return dataset_files(folder), "dataset"
    files = sorted(file for file in folder.rglob("*") if file.is_file() and not is_hidden(file.relative_to(folder)))
    if any(file.name == "prepared.json" for file in files):
        raise FileError(f"{folder} is prepared data; train with the recipe of its folder: regard train recipe.toml")
    if format is None:
        known = [file for file in files if format_of(file)]
        if not known:
            raise FileError(
                f"{folder} has no file that ends in {', '.join(SUFFIXES)}, and no images in subfolders "
                f"(LABEL/FILE.png) or with a metadata.jsonl; for other texts give a pattern: {folder}/**/*.py"
            )
        return known, common_format(folder, known)
    suffix_format = "text" if format in TEXT_FORMATS else format
    selected = [file for file in files if format_of(file) == suffix_format]
    if not selected:
        raise FileError(f"{folder} has no {suffix_format} files; give a pattern such as {folder}/**/*.txt")
    return selected, format


def common_format(path: Path, files: Sequence[Path]) -> str:
    """The format of all files; "files" for text files."""
    formats = sorted({format_of(file) or "text" for file in files})
    if len(formats) > 1:
        raise FileError(f"{path} has files of the formats {', '.join(formats)}; name one, or give a pattern")
    return "files" if formats == ["text"] else formats[0]


def format_of(file: Path) -> str | None:
    """The format of a file's suffix; `.gz` after it is ignored."""
    name = file.with_suffix("") if file.suffix == ".gz" else file
    return SUFFIXES.get(name.suffix.lower())


def is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def fingerprint_file(path: Path) -> bytes:
    """A hash of the contents; of a file over 4 GiB, of its size, its modification time and 64 samples of 1 MiB."""
    status = path.stat()
    with path.open("rb") as stream:
        if status.st_size <= HASHED_BYTES:
            return hashlib.file_digest(stream, new_hash).digest()
        digest = new_hash(f"{status.st_size} {status.st_mtime_ns}".encode())
        for sample in range(SAMPLES):
            stream.seek((status.st_size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
            digest.update(stream.read(SAMPLE_BYTES))
        return digest.digest()


def new_hash(data: bytes = b"") -> hashlib.blake2b:
    return hashlib.blake2b(data, digest_size=16)


def with_messages(example: dict[str, Any]) -> dict[str, Any]:
    """A conversation of ShareGPT or Alpaca as `messages`; an example with fields of this package is left as it is."""
    if any(field in example for field in OWN_FIELDS):
        return example
    turns = example.get("conversations")
    if isinstance(turns, list) and all(
        isinstance(turn, Mapping) and turn.keys() >= {"from", "value"} for turn in turns
    ):
        messages = [{"role": ROLES.get(turn["from"], turn["from"]), "content": turn["value"]} for turn in turns]
        return {name: value for name, value in example.items() if name != "conversations"} | {"messages": messages}
    request, answer = [example.get("instruction"), example.get("input") or ""], example.get("output")
    if all(isinstance(text, str) for text in (*request, answer)):
        messages = [
            {"role": "user", "content": "\n\n".join(filter(None, request))},
            {"role": "assistant", "content": answer},
        ]
        others = {name: value for name, value in example.items() if name not in ("instruction", "input", "output")}
        return others | {"messages": messages}
    return example
