"""Span corruption: predict the spans that were removed from a text. Raffel et al. 2020 (T5).

    text     Thank you for inviting me to your party last week
    source   Thank you <extra_id_0> me to your party <extra_id_1> week
    target   <extra_id_0> for inviting <extra_id_1> last <end>

15 % of the tokens are removed, in spans of three tokens on average. A text of n tokens has round(0.15 n) removed tokens
in round(0.15 n / 3) spans; the lengths of the spans, and of the runs between them, are random partitions. A sentinel
takes the place of each span. A text is sliced so that source and target fit into a row.
"""

from dataclasses import dataclass

import numpy as np

from regard.data.packing import Item
from regard.data.sources.base import Example
from regard.objectives.base import Columns
from regard.objectives.text import end_id, plain_text, require_tokens
from regard.objectives.translation import SequenceToSequence, sequence_item
from regard.spec import SpecError, require
from regard.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class SpanCorruption(SequenceToSequence):
    """Examples have `text`."""

    density: float = 0.15  # fraction of the tokens that are removed
    span: float = 3.0  # mean number of tokens per span
    sentinels: int = 100  # of a tokenizer that is trained for the run

    def check(self) -> None:
        super().check()
        require(0 < self.density < 1, f"{self.kind}: density={self.density} must be between 0 and 1")
        require(self.span >= 1, f"{self.kind}: span={self.span} must be at least 1")
        require(self.sentinels > 0, f"{self.kind}: sentinels={self.sentinels} must be positive")

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return tuple(sentinel(n) for n in range(self.sentinels))

    def prepare_tokenizer(self, tokenizer: Tokenizer) -> None:
        super().prepare_tokenizer(tokenizer)
        if tokenizer.core.token_to_id(sentinel(0)) is None:
            raise SpecError(
                f"this tokenizer has no sentinels {sentinel(0)}, {sentinel(1)} …; train a tokenizer "
                "(tokenizer.by='bpe'), or use that of a T5"
            )

    def tokenize(self, example: Example, tokenizer: Tokenizer) -> Columns:
        ids = np.array(tokenizer.encode(plain_text(self, example)), np.int64)
        require_tokens(self, ids, example)
        return {"ids": ids}

    def sample(self, columns: Columns, tokenizer: Tokenizer, length: int, rng: np.random.Generator) -> list[Item]:
        ids, size = columns["ids"], self.slice_size(length, len(tokenizer.prefix_ids) + len(tokenizer.suffix_ids))
        slices = (ids[start : start + size] for start in range(0, len(ids), size))
        return [self.corrupted_item(part, tokenizer, rng) for part in slices if len(part) > 1]

    def corrupted_item(self, ids: np.ndarray, tokenizer: Tokenizer, rng: np.random.Generator) -> Item:
        removed, spans = self.counts(len(ids))
        sentinels = sentinel_ids(tokenizer, spans)
        source, target = corrupt_spans(
            ids, random_partition(len(ids) - removed, spans, rng), random_partition(removed, spans, rng), sentinels
        )
        source = np.concatenate([tokenizer.prefix_ids, source, tokenizer.suffix_ids]).astype(np.int64)
        return sequence_item(source, np.append(target, end_id(tokenizer)), tokenizer)

    def counts(self, tokens: int) -> tuple[int, int]:
        """The number of removed tokens, and of their spans."""
        removed = min(max(round(self.density * tokens), 1), tokens - 1)
        return removed, min(max(round(removed / self.span), 1), tokens - removed)

    def slice_size(self, length: int, special: int) -> int:
        """The largest number of tokens whose source, with `special` special tokens, and target fit into a row."""

        def fits(tokens: int) -> bool:
            removed, spans = self.counts(tokens)
            return max(tokens - removed + spans + special, removed + spans + 1) <= length

        size = max(2, length)
        while fits(size + 1):
            size += 1
        while size > 2 and not fits(size):
            size -= 1
        if not fits(size):
            raise ValueError(f"length={length} is too short for a source and a target; raise data.length")
        return size


def sentinel(number: int) -> str:
    return f"<extra_id_{number}>"


def sentinel_ids(tokenizer: Tokenizer, count: int) -> list[int]:
    found = (tokenizer.core.token_to_id(sentinel(n)) for n in range(count))
    ids = [id for id in found if id is not None]
    if len(ids) < count:
        raise ValueError(
            f"a text has {count} spans, but the tokenizer has only {len(ids)} sentinels; lower data.length, or raise "
            "objective.sentinels of a tokenizer that is trained"
        )
    return ids


def random_partition(total: int, parts: int, rng: np.random.Generator) -> np.ndarray:
    """The lengths of `parts` parts, each at least 1, that add up to `total`; every partition is equally likely."""
    cuts = np.sort(rng.choice(total - 1, parts - 1, replace=False)) + 1 if parts > 1 else np.array([], np.int64)
    return np.diff(np.concatenate([[0], cuts, [total]]))


def corrupt_spans(
    ids: np.ndarray, kept: np.ndarray, removed: np.ndarray, sentinels: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Source and target of runs of kept and removed tokens that alternate, starting with a kept one."""
    source, target, start = [], [], 0
    for kept_length, removed_length, id in zip(kept.tolist(), removed.tolist(), sentinels, strict=True):
        middle, end = start + kept_length, start + kept_length + removed_length
        source += [ids[start:middle], [id]]
        target += [[id], ids[middle:end]]
        start = end
    return np.concatenate(source).astype(np.int64), np.concatenate(target).astype(np.int64)
