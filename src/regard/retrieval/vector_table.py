"""The vectors of an index, of length 1, in a table of its SQLite file.

    few     all are read into one matrix, and compared exactly
    many    a query is compared with the vectors of the nearest PROBES cells (cells.py); the others stay on disk
            (inverted file, Jégou et al. 2011)

The id of a row is cell · 2⁴⁰ + chunk, so that the vectors of a cell are one range of the file. Vectors without a cell
have cell 0; added ones get a cell as soon as there are cells, which are learned again when the index has doubled.
"""

import sqlite3
from array import array
from collections.abc import Iterable, Sequence

import numpy as np

from regard.retrieval.cells import learn_centres, nearest_centres

SCHEMA = """
CREATE TABLE vectors(
    id INTEGER PRIMARY KEY, chunk INTEGER NOT NULL UNIQUE REFERENCES chunks ON DELETE CASCADE, vector BLOB NOT NULL
);
CREATE TABLE cells(id INTEGER PRIMARY KEY, centre BLOB NOT NULL);
"""
CELL = 1 << 40  # more than there are chunks
MANY = 250_000  # vectors, from which on there are cells
PROBES = 32  # cells that a search reads
SAMPLE = 64  # vectors per cell from which centres are learned
READ = 10_000  # rows at a time


class VectorTable:
    def __init__(self, database: sqlite3.Connection, dim: int, many: int = MANY):
        self.database, self.dim, self.many = database, dim, many
        self.matrix: tuple[object, np.ndarray, np.ndarray] | None = None  # version of the data, chunks (N,), (N, D)
        self.centres: tuple[object, np.ndarray] | None = None  # version of the data, (C, D)

    def add(self, chunks: Sequence[int], vectors: np.ndarray) -> None:
        """Store the vectors (N, D) of chunks, inside a transaction."""
        if vectors.shape != (len(chunks), self.dim):
            raise ValueError(f"vectors have the shape {vectors.shape}, not {(len(chunks), self.dim)}")
        if not np.isfinite(vectors).all():
            raise ValueError("some vectors are not finite; the model cannot embed these chunks")
        vectors = vectors.astype(np.float32)
        centres = self.read_centres()
        cells = nearest_centres(vectors, centres) + 1 if len(centres) else np.zeros(len(chunks), np.int64)
        rows = ((int(cell) * CELL + id, id, v.tobytes()) for id, cell, v in zip(chunks, cells, vectors, strict=True))
        self.database.executemany("INSERT INTO vectors VALUES (?, ?, ?)", rows)

    def nearest(self, vector: np.ndarray, count: int) -> list[tuple[int, float]]:
        """(chunk, cosine) of the chunks of complete files with the largest cosine to a vector (D,) of length 1."""
        vector = vector.astype(np.float32)
        chunks, vectors = self.candidates(vector)
        if not len(chunks) or count < 1:
            return []
        scores = vectors @ vector  # (N,)
        count = min(count, len(chunks))
        best = np.argpartition(-scores, count - 1)[:count]
        best = best[np.lexsort((chunks[best], -scores[best]))]
        return [(int(chunks[i]), float(scores[i])) for i in best]

    def candidates(self, vector: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The chunks (N,) and vectors (N, D) that are compared: all, or those of the nearest cells."""
        centres = self.read_centres()
        if not len(centres):
            return self.all_vectors()
        cells = [0, *(np.argsort(-(centres @ vector))[:PROBES] + 1).tolist()]
        read = "SELECT chunk, vector FROM vectors WHERE id BETWEEN ? AND ?"
        rows = (row for cell in cells for row in self.database.execute(read, [cell * CELL, cell * CELL + CELL - 1]))
        chunks, vectors = stack(rows, self.dim)
        complete = ~np.isin(chunks, self.incomplete())
        return (chunks, vectors) if complete.all() else (chunks[complete], vectors[complete])

    def incomplete(self) -> list[int]:
        """The chunks of files that an update is storing, or was interrupted in."""
        rows = self.database.execute("SELECT chunks.id FROM files JOIN chunks ON file = files.id WHERE NOT complete")
        return [id for (id,) in rows]

    def cosines(self, vector: np.ndarray, chunks: Sequence[int]) -> list[float]:
        """Of a vector (D,) of length 1 and the vectors of these chunks; 0 for a chunk that was removed meanwhile."""
        read = "SELECT chunk, vector FROM vectors WHERE chunk = ?"
        found, vectors = stack((row for id in chunks for row in self.database.execute(read, [id])), self.dim)
        cosines = dict(zip(found.tolist(), (float(row @ vector.astype(np.float32)) for row in vectors), strict=True))
        return [cosines.get(id, 0.0) for id in chunks]

    def all_vectors(self) -> tuple[np.ndarray, np.ndarray]:
        """The chunks (N,) of complete files and their vectors (N, D), read again if the index has changed."""
        version = self.version()
        if self.matrix is None or self.matrix[0] != version:
            rows = self.database.execute(
                "SELECT chunk, vector FROM files JOIN chunks ON file = files.id JOIN vectors ON chunk = chunks.id "
                "WHERE complete"
            )
            self.matrix = version, *stack(rows, self.dim)
        return self.matrix[1:]

    def read_centres(self) -> np.ndarray:
        """(C, D), read again if the index has changed; none without cells."""
        version = self.version()
        if self.centres is None or self.centres[0] != version:
            rows = self.database.execute("SELECT id, centre FROM cells ORDER BY id")
            self.centres = version, stack(rows, self.dim)[1]
        return self.centres[1]

    def version(self) -> object:
        """Changes with every change of the file, by this connection or another."""
        return self.database.total_changes, self.database.execute("PRAGMA data_version").fetchone()

    def count(self) -> int:
        return self.database.execute("SELECT count(*) FROM vectors").fetchone()[0]

    def needs_cells(self) -> bool:
        """Whether there are many vectors and no cells, or twice as many as when the cells were learned."""
        count, cells = self.count(), len(self.read_centres())
        return count >= self.many and cells < cells_for(count) / 2**0.5

    def build_cells(self) -> None:
        """Learn centres from a sample, and move every vector to its cell; inside a transaction."""
        count = self.count()
        cells = cells_for(count)
        rows = self.database.execute(
            "SELECT chunk, vector FROM vectors WHERE chunk % ? = 0", [max(1, count // (SAMPLE * cells))]
        )
        sample = stack(rows, self.dim)[1]
        centres = learn_centres(sample, min(cells, len(sample)))
        self.database.execute("DELETE FROM cells")
        self.database.executemany(
            "INSERT INTO cells VALUES (?, ?)", ((i, centre.tobytes()) for i, centre in enumerate(centres, 1))
        )
        last = -1
        while True:
            rows = self.database.execute(
                "SELECT chunk, vector FROM vectors WHERE chunk > ? ORDER BY chunk LIMIT ?", [last, READ]
            )
            chunks, vectors = stack(rows, self.dim)
            if not len(chunks):
                return
            found = (nearest_centres(vectors, centres) + 1) * CELL + chunks
            self.database.executemany(
                "UPDATE vectors SET id = ? WHERE chunk = ?", zip(found.tolist(), chunks.tolist(), strict=True)
            )
            last = int(chunks[-1])


def cells_for(count: int) -> int:
    """√N cells: as many centres are compared as there are vectors in a cell."""
    return round(count**0.5)


def stack(rows: Iterable[tuple[int, bytes]], dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids (N,) and float32 vectors (N, D)."""
    ids, data = array("q"), bytearray()
    for id, vector in rows:
        if len(vector) != 4 * dim:
            raise sqlite3.DatabaseError(f"vector {id} has {len(vector)} bytes instead of {4 * dim}")
        ids.append(id)
        data += vector
    vectors = np.frombuffer(data, np.float32).reshape(-1, dim)
    if not np.isfinite(vectors).all():
        raise sqlite3.DatabaseError("some vectors are not finite")
    return np.array(ids, np.int64), vectors
