"""The interface of a source, and its splits.

An example is a mapping of named values, as in a line of JSONL: `{"text": …}`, `{"messages": […]}`,
`{"source": …, "target": …}`, `{"text": …, "label": …}`. An open source is an endless sequence: `example(i)` is a pure
function of its settings and `i`, so a position in it is one integer, and every process can read every example.

A finite collection is shuffled again for every epoch. One example in ten is held out, selected by a hash of its
content, so that copies of an example are in the same split.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from regard.spec import Spec, require

Example = Mapping[str, Any]
Transform = Callable[[Example], Example]

HELD_OUT_SHARE = 26 / 256  # of a finite collection
MAX_CACHED_BYTES = 1 << 28  # of transformed examples that are kept in memory


class Examples(Protocol):
    """An endless sequence of examples."""

    @property
    def name(self) -> str: ...

    @property
    def fingerprint(self) -> str:
        """Changes with the content of the examples or their order."""
        ...

    @property
    def count(self) -> int | None:
        """Examples per epoch; None: every example is new."""
        ...

    def example(self, index: int) -> Example: ...

    def map(self, transform: Transform) -> "Examples":
        """The same sequence with every example transformed."""
        ...


class Splits(NamedTuple):
    train: Examples
    held_out: Examples | None


@dataclass(frozen=True)
class DataSource(Spec):
    kind_table: ClassVar[str] = "sources"

    weight: float = 1.0  # share of the examples, relative to the other sources

    def check(self) -> None:
        require(0 < self.weight < 1e9, f"{self.kind}: weight={self.weight} must be positive, and less than 1e9")

    def open(self, seed: int = 0, hold_out: bool = True) -> Splits:
        """The examples for training and the held-out ones; without `hold_out`, all are for training."""
        raise NotImplementedError


@dataclass(frozen=True)
class Generated:
    """Examples computed from their index."""

    name: str
    generate: Callable[[int], Example]

    @property
    def fingerprint(self) -> str:
        return self.name

    @property
    def count(self) -> int | None:
        return None

    def example(self, index: int) -> Example:
        return self.generate(index)

    def map(self, transform: Transform) -> "Generated":
        return Generated(self.name, lambda index: transform(self.generate(index)))


@dataclass(frozen=True)
class Shuffled:
    """A finite collection, repeated, in a new random order for each epoch."""

    name: str
    collection: Sequence[Example]
    fingerprint: str
    seed: int = 0
    _orders: dict[int, list[int]] = field(default_factory=dict, repr=False)

    @property
    def count(self) -> int | None:
        return len(self.collection)

    def example(self, index: int) -> Example:
        epoch, position = divmod(index, len(self.collection))
        if epoch not in self._orders:
            order = list(range(len(self.collection)))
            Random(f"{self.seed}/{epoch}").shuffle(order)
            self._orders.clear()
            self._orders[epoch] = order
        return self.collection[self._orders[epoch][position]]

    def map(self, transform: Transform) -> "Shuffled":
        return Shuffled(self.name, Transformed(self.collection, transform), self.fingerprint, self.seed)


class Transformed(Sequence[Example]):
    """A transformed collection. Transformed examples are kept in memory for later epochs, up to a limit."""

    def __init__(self, collection: Sequence[Example], transform: Transform):
        self.collection, self.transform = collection, transform
        self.cache: dict[int, Example] = {}
        self.free = MAX_CACHED_BYTES

    def __len__(self) -> int:
        return len(self.collection)

    def __getitem__(self, index: Any) -> Any:
        if index not in self.cache:
            example = self.collection[index]
            try:
                example = self.transform(example)
            except ValueError as error:
                origin = getattr(self.collection, "origin", lambda index: f"example {index}")
                raise ValueError(f"{origin(index)}: {error}") from error
            size = sum(value.nbytes for value in example.values() if isinstance(value, np.ndarray))
            if size > self.free:
                return example
            self.free -= size
            self.cache[index] = example
        return self.cache[index]


@dataclass(frozen=True)
class Subset(Sequence[Example]):
    collection: Sequence[Example]
    indices: Sequence[int]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: Any) -> Any:
        return self.collection[self.indices[index]]

    def origin(self, index: int) -> str:
        """The file and the line of an example, if its collection has them, for errors."""
        original = self.indices[index]
        origin = getattr(self.collection, "origin", None)
        return f"example {original}" if origin is None else origin(original)


class Shape(str):
    """A string without quotes in the repr of a dictionary."""

    __repr__ = str.__str__


def shown(example: Example) -> str:
    """An example in an error message: at most 200 characters, and the shapes of arrays."""
    values = {
        name: Shape(f"an array of shape {value.shape}") if isinstance(value, np.ndarray) else value
        for name, value in example.items()
    }
    return f"{values!r:.200}"


def first_epoch(examples: Examples, limit: int) -> Iterator[Example]:
    """One epoch of a finite source; the first `limit` examples of an endless one."""
    return (examples.example(index) for index in range(examples.count or limit))


def open_collection(name: str, collection: Sequence[Example], seed: int, hold_out: bool, tail: bool = False) -> Splits:
    """The splits of a finite collection. `tail`: the last tenth is held out, not a tenth selected by its content."""
    require(len(collection) > 0, f"{name} has no examples; add some text")
    hashes = [digest(example) for example in collection]
    fingerprint = blake2b(b"".join(hashes), digest_size=16).hexdigest()
    held_out = held_out_indices(hashes, tail) if hold_out else set()
    train = [index for index in range(len(hashes)) if index not in held_out]

    def shuffled(split: str, indices: Sequence[int]) -> Shuffled:
        return Shuffled(f"{name}, {split}", Subset(collection, indices), fingerprint, seed)

    return Splits(shuffled("train", train), shuffled("held-out", sorted(held_out)) if held_out else None)


def held_out_indices(hashes: list[bytes], tail: bool) -> set[int]:
    """A tenth of the examples; of two or more different ones at least one, and never all."""
    if tail:
        return set(range(len(hashes) - max(1, len(hashes) // 10), len(hashes))) if len(hashes) > 1 else set()
    selected = {index for index, hash in enumerate(hashes) if hash[0] < 256 * HELD_OUT_SHARE}
    distinct = set(hashes)
    if 0 < len(selected) < len(hashes) or len(distinct) < 2:
        return selected if len(selected) < len(hashes) else set()
    smallest = min(distinct)
    return {index for index, hash in enumerate(hashes) if hash == smallest}


def digest(example: Example) -> bytes:
    """A hash of the content of an example."""
    hash = blake2b(digest_size=16)
    for part in parts_of(example):
        hash.update(part + b"\0")
    return hash.digest()


def parts_of(value: Any) -> Iterator[bytes]:
    if isinstance(value, str):  # first, because tests for abstract classes are slow
        yield value.encode("utf-8", "surrogatepass")
    elif isinstance(value, Mapping):
        for key in sorted(value):
            yield from parts_of(key)
            yield from parts_of(value[key])
    elif isinstance(value, np.ndarray):
        yield from (str(value.shape).encode(), value.tobytes())
    elif isinstance(value, Iterable) and not isinstance(value, bytes):
        for item in value:
            yield from parts_of(item)
    else:
        yield value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")
