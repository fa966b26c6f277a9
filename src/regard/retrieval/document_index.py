"""The index on disk: one SQLite file with the chunks of documents, an index of their words, and their vectors.

    files       path, size, time of change, digest, and whether all chunks of the file are stored
    chunks      text, lines, section                 words     of chunks, for BM25 (FTS5)
    vectors     of chunks (vector_table.py)

A batch of chunks is one transaction, and a file is searched once it is complete: a killed process loses at most a
batch, and the next one continues after it. SQLite and FTS5 are in Python's standard library.
"""

import fcntl
import os
import re
import sqlite3
import unicodedata
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple

import numpy as np

from regard.retrieval.chunks import DocumentChunk
from regard.retrieval.vector_table import SCHEMA as VECTORS
from regard.retrieval.vector_table import VectorTable
from regard.retrieval.word_search import best_by_words

APPLICATION_ID = 0x72656701  # in the header of the file: an index of regard, format 1
NOT_DAMAGED = ("SQLITE_BUSY", "SQLITE_CANTOPEN", "SQLITE_FULL", "SQLITE_IOERR", "SQLITE_PERM", "SQLITE_READONLY")
OPTIONS = {"limit": "--chunk-tokens", "overlap": "--overlap"}  # of `regard index`, by settings
MOST_COUNTS = 100_000  # of words that are kept
SECTION_SEPARATOR = "\x1f"
SCHEMA = """
CREATE TABLE settings(name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE files(
    id INTEGER PRIMARY KEY, path TEXT NOT NULL, size INTEGER NOT NULL, changed INTEGER NOT NULL, digest BLOB NOT NULL,
    unit TEXT NOT NULL, complete INTEGER NOT NULL DEFAULT 0, UNIQUE(path, complete)
);
CREATE TABLE chunks(
    id INTEGER PRIMARY KEY, file INTEGER NOT NULL REFERENCES files ON DELETE CASCADE, start INTEGER NOT NULL,
    first INTEGER NOT NULL, last INTEGER NOT NULL, section TEXT NOT NULL, text TEXT NOT NULL
);
CREATE INDEX chunks_of_file ON chunks(file);
CREATE VIRTUAL TABLE words USING fts5(
    text, section, content=chunks, content_rowid=id, tokenize="porter unicode61 remove_diacritics 2"
);
CREATE TRIGGER add_words AFTER INSERT ON chunks BEGIN
    INSERT INTO words(rowid, text, section) VALUES (new.id, new.text, new.section);
END;
CREATE TRIGGER remove_words AFTER DELETE ON chunks BEGIN
    INSERT INTO words(words, rowid, text, section) VALUES ('delete', old.id, old.text, old.section);
END;
"""


class DocumentIndexError(ValueError):
    """An index that does not exist, is damaged, or was made by other settings."""


@dataclass(frozen=True)
class IndexSettings:
    """What all chunks and vectors of an index have in common."""

    model: str  # name or path of the model that embeds
    fingerprint: str  # of its weights
    dim: int
    limit: int  # tokens per chunk
    overlap: int


class FileRecord(NamedTuple):
    id: int
    size: int
    changed: int  # time of the last change, in nanoseconds
    digest: bytes


class Hit(NamedTuple):
    """A chunk that was found."""

    id: int
    path: str
    unit: str  # of its place: "line" or "page"
    chunk: DocumentChunk
    score: float = 0.0  # of the last ranking: cosine, BM25, hybrid, or that of a cross-encoder


class DocumentIndex:
    def __init__(self, path: str | Path, create: IndexSettings | None = None):
        """create: the settings of a new index, if there is none; those of an existing one must be equal."""
        self.path = Path(path)
        if self.path.is_dir():
            raise DocumentIndexError(f"{path} is a folder; give the file of an index")
        existed = self.path.is_file() and self.path.stat().st_size > 0
        if not existed and create is None:
            raise DocumentIndexError(f"{path} does not exist; make it: regard index DOCUMENTS --out {path}")
        with self.reporting_damage():
            self.database = sqlite3.connect(self.path, isolation_level=None, timeout=30)
            self.prepare(create)
        self.vectors = VectorTable(self.database, self.settings.dim)
        self.counts: tuple[object, dict[str, int]] = None, {}  # version of the data, chunks with a word

    def prepare(self, create: IndexSettings | None) -> None:
        run = self.database.execute
        run("PRAGMA foreign_keys = ON")
        tables = self.has_tables()
        (application,) = run("PRAGMA application_id").fetchone()  # after the tables, which another process may create
        if application != APPLICATION_ID and (tables or create is None):
            raise DocumentIndexError(f"{self.path} is not an index of regard; give another path")
        if not tables:
            assert create is not None
            self.create_tables(create)
        run("PRAGMA journal_mode = WAL")  # after the tables: another process finds no file, or all tables
        run("PRAGMA synchronous = NORMAL")  # a crash of the machine may lose the last batches, but nothing else
        stored = dict(run("SELECT name, value FROM settings"))
        for field in fields(IndexSettings):
            if type(stored.get(field.name)) is not field.type:
                raise sqlite3.DatabaseError(f"the setting {field.name} is {stored.get(field.name)!r:.40}")
        self.settings = IndexSettings(**{field.name: stored[field.name] for field in fields(IndexSettings)})
        for field in fields(IndexSettings) if create is not None else ():
            found, wanted = getattr(self.settings, field.name), getattr(create, field.name)
            if found != wanted and field.name != "model":
                name = OPTIONS.get(field.name, field.name)
                raise DocumentIndexError(
                    f"{self.path} was made with {name} {found}, not {wanted}; use the same settings, or another path"
                )

    def has_tables(self) -> bool:
        return self.database.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0] > 0

    def create_tables(self, settings: IndexSettings) -> None:
        with self.transaction():
            if self.has_tables():  # another process was faster
                return
            for statement in split_statements(SCHEMA + VECTORS):
                self.database.execute(statement)
            self.database.executemany("INSERT INTO settings VALUES (?, ?)", asdict(settings).items())
            self.database.execute(f"PRAGMA application_id = {APPLICATION_ID}")

    @contextmanager
    def reporting_damage(self) -> Generator[None]:
        """Errors of SQLite as a DocumentIndexError."""
        try:
            yield
        except sqlite3.ProgrammingError:
            raise
        except sqlite3.DatabaseError as error:
            if getattr(error, "sqlite_errorname", "").startswith(NOT_DAMAGED):
                raise DocumentIndexError(f"{self.path} cannot be used: {error}") from None
            raise DocumentIndexError(
                f"{self.path} is not an index, or is damaged: {error}; make it again at another path"
            ) from None

    @contextmanager
    def transaction(self) -> Generator[None]:
        """All changes inside are made, or none."""
        self.database.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            if self.database.in_transaction:  # SQLite ends it after some errors
                self.database.execute("ROLLBACK")
            raise
        self.database.execute("COMMIT")

    @contextmanager
    def updating(self) -> Generator[None]:
        """Hold the lock of an update: two at a time would store the same chunks twice. It ends with the process.

        The lock is a file of its own: closing a second handle of the database would release the locks of SQLite.
        """
        handle = os.open(self.path.with_name(f".{self.path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise DocumentIndexError(f"another process updates {self.path}; wait for it") from None
        try:
            with self.reporting_damage():
                yield
        finally:
            os.close(handle)

    def close(self) -> None:
        self.database.close()

    # What is stored

    def files(self) -> dict[str, FileRecord]:
        """The complete files, by path."""
        with self.reporting_damage():
            rows = self.database.execute("SELECT path, id, size, changed, digest FROM files WHERE complete")
            return {path: FileRecord(*values) for path, *values in rows}

    def paths(self) -> set[str]:
        """Of all files, also those whose storing was interrupted."""
        with self.reporting_damage():
            return {path for (path,) in self.database.execute("SELECT path FROM files")}

    def has_place(self, path: str, place: int) -> bool:
        """Whether a chunk of this complete file has this line or page."""
        covers = (
            "SELECT count(*) FROM chunks JOIN files ON files.id = file "
            "WHERE complete AND path = ? AND first <= ? AND last >= ?"
        )
        with self.reporting_damage():
            return self.database.execute(covers, [path, place, place]).fetchone()[0] > 0

    def chunk_count(self) -> int:
        count = "SELECT count(*) FROM chunks JOIN files ON files.id = file WHERE complete"
        with self.reporting_damage():
            return self.database.execute(count).fetchone()[0]

    def begin(self, path: str, size: int, changed: int, digest: bytes, unit: str) -> tuple[int, int]:
        """The id of a file that is about to be stored, and how many of its chunks an interrupted run has stored."""
        with self.transaction():
            row = self.database.execute(
                "SELECT id, digest FROM files WHERE path = ? AND NOT complete", [path]
            ).fetchone()
            if row is not None and row[1] == digest:
                (stored,) = self.database.execute("SELECT count(*) FROM chunks WHERE file = ?", [row[0]]).fetchone()
                return row[0], stored
            self.database.execute("DELETE FROM files WHERE path = ? AND NOT complete", [path])
            cursor = self.database.execute(
                "INSERT INTO files(path, size, changed, digest, unit) VALUES (?, ?, ?, ?, ?)",
                [path, size, changed, digest, unit],
            )
            assert cursor.lastrowid is not None
            return cursor.lastrowid, 0

    def add(self, file: int, chunks: Sequence[DocumentChunk], vectors: np.ndarray) -> None:
        """Store chunks of a file with their vectors (N, D), of length 1."""
        with self.transaction():
            ids = []
            for chunk in chunks:
                cursor = self.database.execute(
                    "INSERT INTO chunks(file, start, first, last, section, text) VALUES (?, ?, ?, ?, ?, ?)",
                    [file, chunk.start, chunk.first, chunk.last, SECTION_SEPARATOR.join(chunk.section), chunk.text],
                )
                assert cursor.lastrowid is not None
                ids.append(cursor.lastrowid)
            self.vectors.add(ids, vectors)

    def build_cells(self) -> None:
        """Divide the vectors into cells, if there are many (vector_table.py)."""
        if self.vectors.needs_cells():
            with self.transaction():
                self.vectors.build_cells()

    def finish(self, file: int) -> None:
        """The file is complete; it replaces an earlier version."""
        with self.transaction():
            (path,) = self.database.execute("SELECT path FROM files WHERE id = ?", [file]).fetchone()
            self.database.execute("DELETE FROM files WHERE path = ? AND complete", [path])
            self.database.execute("UPDATE files SET complete = 1 WHERE id = ?", [file])

    def set_changed(self, path: str, changed: int) -> None:
        """Store a new time of change of a file whose content is the same."""
        self.database.execute("UPDATE files SET changed = ? WHERE path = ? AND complete", [changed, path])

    def remove(self, path: str) -> None:
        with self.transaction():
            self.database.execute("DELETE FROM files WHERE path = ?", [path])

    # Search

    def matching(self, query: str, count: int) -> list[tuple[int, float]]:
        """(chunk, BM25) of the chunks with words of the query, the highest first."""
        words = list(dict.fromkeys(re.findall(r"\w+", unicodedata.normalize("NFC", query))))
        if not words or count < 1:
            return []
        with self.snapshot():  # the counts of words and the scores are of one version
            if self.vectors.version() != self.counts[0] or len(self.counts[1]) > MOST_COUNTS:
                self.counts = self.vectors.version(), {}
            return best_by_words(self.database, words, count, self.counts[1])

    @contextmanager
    def snapshot(self) -> Generator[None]:
        """What is read inside is one version of the index, whatever other processes write."""
        self.database.execute("BEGIN")
        try:
            yield
        finally:
            if self.database.in_transaction:  # SQLite ends it after some errors
                self.database.execute("ROLLBACK")

    def hits(self, ids: Sequence[int]) -> list[Hit]:
        """The chunks with these ids, in this order."""
        rows = {}
        for id in ids:
            row = self.database.execute(
                "SELECT path, unit, text, start, first, last, section FROM chunks JOIN files ON files.id = file "
                "WHERE chunks.id = ?",
                [id],
            ).fetchone()
            if row is not None:
                path, unit, text, start, first, last, section = row
                titles = tuple(section.split(SECTION_SEPARATOR)) if section else ()
                rows[id] = Hit(id, path, unit, DocumentChunk(text, start, first, last, titles))
        return [rows[id] for id in ids if id in rows]

    def check(self) -> None:
        """Raise DocumentIndexError if the file is damaged or its tables contradict one another."""
        run = self.database.execute
        problems = [row[0] for row in run("PRAGMA integrity_check") if row[0] != "ok"]
        problems += [f"a row of {row[0]} has no {row[2]}" for row in run("PRAGMA foreign_key_check")]
        try:
            run("INSERT INTO words(words, rank) VALUES ('integrity-check', 1)")
        except sqlite3.DatabaseError as error:
            problems.append(f"words: {error}")
        (missing,) = run(
            "SELECT count(*) FROM chunks LEFT JOIN vectors ON chunk = chunks.id "
            "WHERE vector IS NULL OR length(vector) != ?",
            [4 * self.settings.dim],
        ).fetchone()
        if missing:
            problems.append(f"{missing} chunks have no vector of {self.settings.dim} numbers")
        if problems:
            raise DocumentIndexError(f"{self.path} is damaged: {'; '.join(problems)}; make it again")


def split_statements(script: str) -> Iterator[str]:
    """The statements of a script, which `executescript` would run outside of a transaction."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
