"""The loader: examples of a source, encoded for an objective and collated into batches, with a state that can be saved.

An objective turns an example into items. If it packs them, a row holds several, else one. Random choices, such as
masked tokens, are drawn from a generator that is seeded with the index of the example.

The state is the number of batches, the index of the next example and the list of pending items, each identified by the
index of its example and its own index among the items of that example. These are a few integers, and a loader that
restores them continues with bit-identical batches. Every rank prepares the whole batch and keeps its share of the rows,
so batches do not depend on the number of ranks, and all ranks have the same state.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np

from regard.data.batch import Batch
from regard.data.packing import Item, best_fit, item_length
from regard.data.sources.base import Examples
from regard.data.sources.mixture import distinct_end, is_repeated
from regard.data.tokenization import Tokenization, Tokenizes
from regard.text.tokenizer import Tokenizer

MAX_EMPTY_EXAMPLES = 10_000  # consecutive examples without an item
NEXT_EXAMPLES = 1000  # of an endless source, from which another example is drawn
MOST_PARTS = 8  # of a batch or of a row at the start of a warm-up
MAX_PENDING = 32  # items to choose from; with more, rows are fuller and documents further out of order


class ExampleEncoder(Tokenizes, Protocol):
    """How an objective turns examples into batches."""

    @property
    def packed(self) -> bool:
        """Whether a row holds several items."""
        ...

    @property
    def needs_other(self) -> bool:
        """Whether `sample` also gets the columns of another example, as `other_NAME`."""
        ...

    @property
    def scope(self) -> Literal["token", "batch"]:
        """batch: the loss compares the rows of a batch."""
        ...

    def sample(
        self, columns: Mapping[str, np.ndarray], tokenizer: Tokenizer, length: int, rng: np.random.Generator
    ) -> list[Item]: ...

    def collate(self, rows: Sequence[Sequence[Item]], tokenizer: Tokenizer, length: int) -> Batch: ...


class Loader:
    """An endless iterator of batches. `rows` is the global batch size; each rank gets `rows / ranks`.

    length: the largest number of tokens per row. warmup: the first batches have fewer rows: an eighth, a quarter, then
    half of them, for a third of this number of batches each.
    """

    def __init__(
        self,
        examples: Examples,
        objective: ExampleEncoder,
        tokenizer: Tokenizer,
        rows: int,
        length: int,
        seed: int = 0,
        rank: int = 0,
        ranks: int = 1,
        warmup: int = 0,
    ):
        if rows < 1 or length < 1:
            raise ValueError(f"rows={rows} and length={length} must be at least 1")
        if not 0 <= rank < ranks:
            raise ValueError(f"rank={rank} must be from 0 to {ranks - 1}, because ranks={ranks}")
        if rows % ranks:
            raise ValueError(f"rows={rows} is not divisible by ranks={ranks}; use a multiple of {ranks}")
        if warmup and rows % (MOST_PARTS * ranks):
            raise ValueError(
                f"rows={rows} with a warm-up and ranks={ranks}: an eighth of the rows is not divisible by the ranks; "
                f"use a multiple of {MOST_PARTS * ranks}, or no warm-up (data.batch_warmup=0)"
            )
        if objective.needs_other and examples.count == 1:
            raise ValueError(f"{examples.name} is one example, and this objective also needs another one; add some")
        self.examples = examples.map(Tokenization(objective, tokenizer))
        self.objective, self.tokenizer, self.rows, self.length = objective, tokenizer, rows, length
        self.seed, self.rank, self.ranks, self.warmup = seed, rank, ranks, warmup
        self._batches = self._next_example = 0
        self._pending: list[tuple[int, int, Item]] = []  # (example, index of the item, item)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        count = self.rows // warmup_parts(self._batches, self.warmup)
        rows = [self._next_row() for _ in range(count)]
        self._batches += 1
        return self._collate(rows)

    def without_repetition(self, batches: int) -> Iterator[Batch]:
        """The first batches, at most `batches`, in which no example occurs twice; the last one may have fewer rows.

        If the loss compares the rows of a batch, fewer rows would make it easier, so all batches have the same number:
        `rows`, or all that there are. For ranks, the number of rows in the last batch is rounded down.
        """
        whole = self.objective.scope == "batch"
        for number in range(batches):
            rows: list[list[Item]] = []
            while len(rows) < self.rows and self._fill(self._choice, repeat=False):
                rows.append(self._next_row(repeat=False))
            rows = rows[: len(rows) - len(rows) % self.ranks]
            if len(rows) < (1 if not whole else self.rows if number else 2):
                return
            yield self._collate(rows)

    def _collate(self, rows: list[list[Item]]) -> Batch:
        batch, share = self.objective.collate(rows, self.tokenizer, self.length), len(rows) // self.ranks
        return batch if self.ranks == 1 else batch.rows(slice(self.rank * share, (self.rank + 1) * share))

    @property
    def unit(self) -> str:
        """The unit of `step_size` and `epoch_size`."""
        return "tokens" if self.objective.packed else "examples"

    @property
    def step_size(self) -> int:
        """The size of a whole batch after the warm-up, including padding."""
        return self.rows * (self.length if self.objective.packed else 1)

    def total_size(self, steps: int) -> int:
        """The size of all batches of this number of steps."""
        short = range(min(steps, self.warmup))
        saved = sum(self.step_size - self.step_size // warmup_parts(batch, self.warmup) for batch in short)
        return steps * self.step_size - saved

    def epoch_size(self) -> int | None:
        """The size of one epoch, in which every example is visited once; None if every example is new."""
        packed = self.objective.packed
        return self._estimate(lambda i: sum(map(item_length, self._items(i))) if packed else len(self._items(i)))

    def data_size(self) -> int | None:
        """The size of all examples. It is larger than an epoch if a visit takes one slice of a long document."""
        packed = self.objective.packed
        return self._estimate(lambda i: len(self.examples.example(i)["ids"]) - 1) if packed else self.epoch_size()

    def _estimate(self, size: Callable[[int], int]) -> int | None:
        """The sum of the sizes of all examples, from a few of them; None if their number is not finite."""
        count = self.examples.count
        if count is None:
            return None
        few = min(count, 64)
        return round(sum(map(size, range(few))) / few * count)

    def state_dict(self) -> dict[str, Any]:
        pending = [[example, index] for example, index, _ in self._pending]
        return {
            "source": self.examples.name,
            "fingerprint": self.examples.fingerprint,
            "length": self.length,
            "batches": self._batches,
            "next": self._next_example,
            "waiting": pending,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, current in (("source", self.examples.name), ("length", self.length)):
            if state[name] != current:
                raise ValueError(
                    f"the saved loader has {name}={state[name]!r}, this one {current!r}; resume with the same data"
                )
        if state["fingerprint"] != self.examples.fingerprint:
            raise ValueError(
                f"the data of {self.examples.name} changed after the checkpoint was saved; restore the files to "
                "resume, or start a new run from the checkpoint (regard train --from RUN)"
            )
        self._batches, self._next_example = state.get("batches", 0), state["next"]  # old states have no batches
        self._pending = [(example, index, self._items(example)[index]) for example, index in state["waiting"]]

    @property
    def _choice(self) -> int:
        """The number of pending items that a row is chosen from."""
        return MAX_PENDING if self.objective.packed else 1

    def _next_row(self, repeat: bool = True) -> list[Item]:
        packed = self.objective.packed
        self._fill(self._choice, repeat)
        indices = best_fit([item_length(item) for _, _, item in self._pending], self.length) if packed else [0]
        row = [self._pending[index][2] for index in indices]
        self._pending = [entry for index, entry in enumerate(self._pending) if index not in indices]
        return row

    def _fill(self, count: int, repeat: bool = True) -> int:
        """Read examples until `count` items are pending, or no new one is left; returns their number."""
        empty, end = 0, None if repeat else distinct_end(self.examples)
        while len(self._pending) < count and (end is None or self._next_example < end):
            if not repeat and is_repeated(self.examples, self._next_example):
                self._next_example += 1
                continue
            items = self._items(self._next_example)
            empty = 0 if items else empty + 1
            if empty == most_empty(self.examples):
                raise ValueError(
                    f"{self.examples.name}: {empty} examples in a row have nothing to train on: fewer than two tokens, "
                    f"or no token with a loss among the first data.length={self.length}; use other examples, or raise "
                    "data.length"
                )
            self._pending += [(self._next_example, index, item) for index, item in enumerate(items)]
            self._next_example += 1
        return len(self._pending)

    def _items(self, index: int) -> list[Item]:
        rng = np.random.default_rng((self.seed, index))
        columns = self.examples.example(index)
        if self.objective.needs_other:
            other = self.examples.example(other_index(index, self.examples.count, rng))
            columns = {**columns, **{f"other_{name}": column for name, column in other.items()}}
        return self.objective.sample(columns, self.tokenizer, self.length, rng)


def most_empty(examples: Examples) -> int:
    """Consecutive examples without an item after which the search for one ends; of a small collection, two epochs."""
    return MAX_EMPTY_EXAMPLES if examples.count is None else min(MAX_EMPTY_EXAMPLES, max(100, 2 * examples.count))


def warmup_parts(done: int, warmup: int) -> int:
    """8, 4 and 2 for a third each of the first `warmup` steps, then 1; `done`: steps before this one."""
    return 1 if done >= warmup else MOST_PARTS >> 3 * done // warmup


def other_index(index: int, count: int | None, rng: np.random.Generator) -> int:
    """The index of another example: a random one of the same epoch, or one of the next of an endless source."""
    if count is None:
        return index + 1 + int(rng.integers(NEXT_EXAMPLES))
    epoch, position = divmod(index, count)
    return epoch * count + (position + int(rng.integers(1, max(2, count)))) % count
