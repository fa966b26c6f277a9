"""The loader: documents of a source, tokenized and packed into batches, with a state that can be saved.

The state is the index of the next document and the list of pending document slices, each identified by the index of
its document and its own index in that document. These are a few integers, and a loader that restores them continues
with bit-identical batches.
Every rank packs the whole batch and keeps its share of the rows, so batches do not depend on the number of ranks, and
all ranks have the same state.
"""

from collections.abc import Iterator
from typing import Any

from regard.data.batch import Batch
from regard.data.packing import DocumentSlice, best_fit, collate, slice_document, tokenize
from regard.data.sources import DataSource
from regard.text.tokenizer import Tokenizer

MAX_EMPTY_DOCUMENTS = 10_000  # consecutive documents without a (token, target) pair
MAX_PENDING = 32  # slices to choose from; with more, rows are fuller and documents further out of order


class Loader:
    """An endless iterator of batches. `rows` is the global batch size; each rank gets `rows / ranks`."""

    def __init__(self, source: DataSource, tokenizer: Tokenizer, rows: int, length: int, rank: int = 0, ranks: int = 1):
        if rows < 1 or length < 1:
            raise ValueError(f"rows={rows} and length={length} must be at least 1")
        if not 0 <= rank < ranks:
            raise ValueError(f"rank={rank} must be from 0 to {ranks - 1}, because ranks={ranks}")
        if rows % ranks:
            raise ValueError(f"rows={rows} is not divisible by ranks={ranks}; use a multiple of {ranks}")
        self.source, self.tokenizer, self.rows, self.length = source, tokenizer, rows, length
        self.rank, self.ranks = rank, ranks
        self._next_document = 0
        self._pending: list[tuple[int, int, DocumentSlice]] = []  # (document, index of the slice, slice)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        packed = [self._pack_row() for _ in range(self.rows)]
        share = self.rows // self.ranks
        local = packed[self.rank * share : (self.rank + 1) * share]
        return collate(local, self.length, self.tokenizer.pad or 0)

    def state_dict(self) -> dict[str, Any]:
        pending = [[document, index] for document, index, _ in self._pending]
        return {"source": self.source.name, "length": self.length, "next": self._next_document, "waiting": pending}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, current in (("source", self.source.name), ("length", self.length)):
            if state[name] != current:
                raise ValueError(
                    f"the saved loader has {name}={state[name]!r}, this one {current!r}; resume with the same data"
                )
        self._next_document = state["next"]
        self._pending = [(document, index, self._slices(document)[index]) for document, index in state["waiting"]]

    def _pack_row(self) -> list[DocumentSlice]:
        empty = 0
        while len(self._pending) < MAX_PENDING:
            slices = self._slices(self._next_document)
            empty = 0 if slices else empty + 1
            if empty == MAX_EMPTY_DOCUMENTS:
                raise ValueError(
                    f"{self.source.name}: {empty} documents in a row have fewer than two tokens; use longer documents"
                )
            self._pending += [(self._next_document, index, slice) for index, slice in enumerate(slices)]
            self._next_document += 1
        indices = best_fit([len(slice) for _, _, slice in self._pending], self.length)
        row = [self._pending[index][2] for index in indices]
        packed = set(indices)
        self._pending = [entry for index, entry in enumerate(self._pending) if index not in packed]
        return row

    def _slices(self, document: int) -> list[DocumentSlice]:
        return slice_document(tokenize(self.source.document(document), self.tokenizer), self.length)
