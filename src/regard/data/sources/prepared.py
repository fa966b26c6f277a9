"""Examples that `regard data prepare` tokenized: a folder with the shards of each split (data/shards.py).

    train/       the examples for training
    held-out/    the held-out examples, if there are any

The arrays belong to one objective and one tokenizer. A loader with another one is refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from regard.data.shards import ShardedExamples
from regard.data.sources.base import DataSource, Example, Shuffled, Splits, Transform
from regard.data.tokenization import Tokenization
from regard.spec import require

TRAIN, HELD_OUT = "train", "held-out"


@dataclass(frozen=True)
class Prepared(DataSource):
    path: str = ""

    def check(self) -> None:
        super().check()
        require(bool(self.path), "prepared: path is missing; set data.path to a folder of regard data prepare")

    def open(self, seed: int = 0, hold_out: bool = True) -> Splits:
        train = PreparedExamples.open(Path(self.path) / TRAIN, seed)
        held_out = Path(self.path) / HELD_OUT
        return Splits(train, PreparedExamples.open(held_out, seed) if hold_out and held_out.exists() else None)


@dataclass(frozen=True)
class PreparedExamples:
    """Tokenized examples, repeated, in a new random order for each epoch."""

    arrays: ShardedExamples
    shuffled: Shuffled

    @classmethod
    def open(cls, folder: Path, seed: int) -> "PreparedExamples":
        arrays = ShardedExamples(folder)
        name = f"prepared {arrays.fingerprint[:8]}, seed {seed}, {folder.name}"
        return cls(arrays, Shuffled(name, WideIntegers(arrays), arrays.fingerprint, seed))

    @property
    def name(self) -> str:
        return self.shuffled.name

    @property
    def fingerprint(self) -> str:
        return self.shuffled.fingerprint

    @property
    def count(self) -> int | None:
        return self.shuffled.count

    def example(self, index: int) -> Example:
        return self.shuffled.example(index)

    def map(self, transform: Transform) -> "PreparedExamples":
        """The examples themselves, if the transform is the tokenization that they were prepared with."""
        assert isinstance(transform, Tokenization), f"prepared examples cannot be transformed by {transform}"
        for name, current in transform.fingerprints().items():
            require(
                self.arrays.fingerprints.get(name) == current,
                f"{self.arrays.folder} was prepared with another {name}; train with the recipe that regard data "
                "prepare wrote, or prepare the data again",
            )
        return self


@dataclass(frozen=True)
class WideIntegers(Sequence[Example]):
    """The arrays with integers as int64, as objectives return them: a negative label must not wrap around."""

    arrays: ShardedExamples

    def __len__(self) -> int:
        return len(self.arrays)

    def __getitem__(self, index: Any) -> Any:
        columns = self.arrays[index].items()
        return {name: values if values.dtype.kind == "f" else values.astype(np.int64) for name, values in columns}
