"""A mixture of sources: each contributes examples in proportion to its weight.

Examples come in blocks of 1000. In every block each source has its exact share, in a random order, so that the source
of example i and its index in that source are pure functions of i.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from random import Random

from regard.data.sources.base import DataSource, Example, Examples, Splits, Transform
from regard.spec import require

BLOCK = 1000  # examples


@dataclass(frozen=True)
class Mixture:
    sources: tuple[Examples, ...]
    weights: tuple[float, ...]
    seed: int = 0
    _blocks: dict[int, list[int]] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        return " + ".join(source.name for source in self.sources)

    @property
    def fingerprint(self) -> str:
        return " + ".join(f"{w} {source.fingerprint}" for w, source in zip(self.weights, self.sources, strict=True))

    @property
    def count(self) -> int | None:
        return None

    @cached_property
    def shares(self) -> list[int]:
        """Examples of each source per block, rounded so that they add up to BLOCK."""
        total = sum(self.weights)
        bounds = [round(BLOCK * part / total) for part in accumulate(self.weights, initial=0.0)]
        shares = [end - start for start, end in zip(bounds, bounds[1:], strict=False)]
        for source, weight, share in zip(self.sources, self.weights, shares, strict=True):
            require(
                share > 0,
                f"{source.name}: weight={weight:g} is less than 1/{BLOCK} of all weights ({total:g}), so none of its "
                "examples would be used; raise the weight, or remove the source",
            )
        return shares

    def example(self, index: int) -> Example:
        source, position = self.locate(index)
        return self.sources[source].example(position)

    def locate(self, index: int) -> tuple[int, int]:
        """The source of an example, and its index in that source."""
        block, position = divmod(index, BLOCK)
        if block not in self._blocks:
            order = list(range(BLOCK))
            Random(f"{self.seed}/{block}").shuffle(order)
            self._blocks.clear()
            self._blocks[block] = order
        starts = list(accumulate(self.shares, initial=0))
        slot = self._blocks[block][position]
        source = bisect_right(starts, slot) - 1
        return source, block * self.shares[source] + slot - starts[source]

    def map(self, transform: Transform) -> "Mixture":
        return Mixture(tuple(source.map(transform) for source in self.sources), self.weights, self.seed)


def is_repeated(examples: Examples, index: int) -> bool:
    """Whether a finite source had the example at this index before."""
    if isinstance(examples, Mixture):
        source, position = examples.locate(index)
        return is_repeated(examples.sources[source], position)
    return examples.count is not None and index >= examples.count


def distinct_end(examples: Examples) -> int | None:
    """The index from which on all examples are repeated; None if there is always a new one."""
    if not isinstance(examples, Mixture):
        return examples.count
    ends = [distinct_end(source) for source in examples.sources]
    blocks = [-(-end // share) for end, share in zip(ends, examples.shares, strict=True) if end is not None]
    return BLOCK * max(blocks) if len(blocks) == len(ends) else None


def open_sources(sources: Sequence[DataSource], seed: int, hold_out: bool) -> Splits:
    """The splits of one source, or of the mixture of several."""
    opened = [source.open(seed, hold_out) for source in sources]
    if len(opened) == 1:
        return opened[0]
    train = Mixture(tuple(splits.train for splits in opened), tuple(source.weight for source in sources), seed)
    _ = train.shares  # a weight that is too small is reported at once
    with_held_out = [
        (splits.held_out, source.weight) for splits, source in zip(opened, sources, strict=True) if splits.held_out
    ]
    held_out = Mixture(tuple(part for part, _ in with_held_out), tuple(weight for _, weight in with_held_out), seed)
    return Splits(train, held_out if with_held_out else None)
