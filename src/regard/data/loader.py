"""The loader: documents of a source, tokenized, packed, and handed out as batches; its place can be saved.

The place is the number of the next document and the list of pieces that wait for a row, each named by its document, so
the state is a few numbers and what follows it is bit-identical. Every rank packs the whole batch and keeps its rows:
the batches of a run do not depend on how many ranks share them, and one state serves all.
"""

from collections.abc import Iterator
from typing import Any

from regard.data.batch import Batch
from regard.data.packing import DocumentSlice, choose, collate, cut, tokenize
from regard.data.sources import DataSource
from regard.text.tokenizer import Tokenizer

BARREN = 10_000  # documents without a pair to learn from, after which none is expected
WAITING = 32  # pieces to choose from; more fill rows better and mix neighbours further apart


class Loader:
    """Batches without end. `rows` counts the whole batch over all ranks; each gets `rows / ranks`."""

    def __init__(self, source: DataSource, tokenizer: Tokenizer, rows: int, length: int, rank: int = 0, ranks: int = 1):
        if rows < 1 or length < 1:
            raise ValueError(f"rows={rows} and length={length} must be at least 1")
        if rows % ranks or not 0 <= rank < ranks:
            raise ValueError(f"rows={rows} cannot be shared by ranks={ranks} (rank={rank}); use a multiple of {ranks}")
        self.source, self.tokenizer, self.rows, self.length = source, tokenizer, rows, length
        self.rank, self.ranks = rank, ranks
        self._next = 0
        self._waiting: list[tuple[int, int, DocumentSlice]] = []  # (document, which piece of it, the piece)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        packed = [self._row() for _ in range(self.rows)]
        share = self.rows // self.ranks
        mine = packed[self.rank * share : (self.rank + 1) * share]
        return collate(mine, self.length, self.tokenizer.pad or 0)

    def state_dict(self) -> dict[str, Any]:
        waiting = [[document, number] for document, number, _ in self._waiting]
        return {"source": self.source.name, "length": self.length, "next": self._next, "waiting": waiting}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, mine in (("source", self.source.name), ("length", self.length)):
            if state[name] != mine:
                raise ValueError(
                    f"the saved loader has {name}={state[name]!r}, this one {mine!r}; resume with the same data"
                )
        self._next = state["next"]
        self._waiting = [(document, number, self._pieces(document)[number]) for document, number in state["waiting"]]

    def _row(self) -> list[DocumentSlice]:
        barren = 0
        while len(self._waiting) < WAITING:
            new = self._pieces(self._next)
            barren = 0 if new else barren + 1
            if barren == BARREN:
                raise ValueError(
                    f"{self.source.name}: {BARREN} documents in a row have fewer than two tokens; give it longer texts"
                )
            self._waiting += [(self._next, number, piece) for number, piece in enumerate(new)]
            self._next += 1
        chosen = choose([len(piece) for _, _, piece in self._waiting], self.length)
        row = [self._waiting[index][2] for index in chosen]
        taken = set(chosen)
        self._waiting = [entry for index, entry in enumerate(self._waiting) if index not in taken]
        return row

    def _pieces(self, document: int) -> list[DocumentSlice]:
        return cut(tokenize(self.source.document(document), self.tokenizer), self.length)
