"""Denoising: reconstruct a text from a corrupted copy. Lewis et al. 2019 (BART).

    permute   the sentences in a random order                              rotate   start at a random token
    delete    tokens are removed                                           mask     tokens are replaced by [MASK]
    infill    spans of Poisson(3) tokens are each replaced by one [MASK]; a span of length 0 inserts a [MASK]

They are applied in this order, those with a share or probability above 0. BART uses infill = 0.3 and permute = 1.
"""

from dataclasses import dataclass

import numpy as np

from regard.data.packing import Item
from regard.data.sources.base import Example
from regard.objectives.base import Columns
from regard.objectives.masked import mask_id
from regard.objectives.text import end_id, plain_text, require_tokens
from regard.objectives.translation import SequenceToSequence, sequence_item
from regard.spec import require
from regard.text.borders import encode_sentences
from regard.text.tokenizer import Tokenizer
from regard.text.train import MASK


@dataclass(frozen=True)
class Denoising(SequenceToSequence):
    """Examples have `text`."""

    permute: float = 1.0  # probability that the sentences of a text are permuted
    rotate: float = 0.0  # probability that a text is rotated
    delete: float = 0.0  # fraction of the tokens that are removed
    mask: float = 0.0  # fraction of the tokens that become [MASK]
    infill: float = 0.3  # fraction of the tokens in spans that become one [MASK]
    span: float = 3.0  # mean length of these spans

    special_tokens = (MASK,)

    def check(self) -> None:
        super().check()
        for name in ("permute", "rotate", "delete", "mask", "infill"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"{self.kind}: {name}={value} must be between 0 and 1")
        require(self.span > 0, f"{self.kind}: span={self.span} must be positive")
        corruptions = self.permute + self.rotate + self.delete + self.mask + self.infill
        require(corruptions > 0, f"{self.kind}: all corruptions are 0, so source and target are equal; set infill")

    def prepare_tokenizer(self, tokenizer: Tokenizer) -> None:
        super().prepare_tokenizer(tokenizer)
        mask_id(tokenizer)

    def tokenize(self, example: Example, tokenizer: Tokenizer) -> Columns:
        ids, sentences = encode_sentences(tokenizer, plain_text(self, example))
        require_tokens(self, ids, example)
        return {"ids": ids, "sentences": sentences}

    def sample(self, columns: Columns, tokenizer: Tokenizer, length: int, rng: np.random.Generator) -> list[Item]:
        size = length - max(len(tokenizer.prefix_ids) + len(tokenizer.suffix_ids), 1)  # 1: the end of the target
        if size < 1:
            raise ValueError(
                f"length={length} has no space beside the special tokens of this tokenizer; raise data.length"
            )
        items = []
        for start in range(0, len(columns["ids"]), size):
            ids, sentences = (columns[name][start : start + size].astype(np.int64) for name in ("ids", "sentences"))
            source = np.concatenate(
                [tokenizer.prefix_ids, self.corrupt(ids, sentences, mask_id(tokenizer), rng), tokenizer.suffix_ids]
            )
            items.append(sequence_item(source.astype(np.int64), np.append(ids, end_id(tokenizer)), tokenizer))
        return items

    def corrupt(self, ids: np.ndarray, sentences: np.ndarray, mask: int, rng: np.random.Generator) -> np.ndarray:
        """The corrupted ids, at most as many as before."""
        if rng.random() < self.permute:
            ids = ids[sentence_permutation(sentences, rng)]
        if rng.random() < self.rotate:
            ids = np.roll(ids, -rng.integers(len(ids)))
        if self.delete:
            kept = rng.random(len(ids)) >= self.delete
            ids = ids[kept] if kept.any() else ids[:1]
        if self.mask:
            ids = np.where(rng.random(len(ids)) < self.mask, mask, ids)
        return infill_spans(ids, mask, *infilled_spans(len(ids), self.infill, self.span, rng)) if self.infill else ids


def sentence_permutation(sentences: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The indices of the tokens with their sentences in a random order."""
    ranks = rng.permutation(sentences.max() + 1)
    return np.argsort(ranks[sentences], kind="stable")


def infilled_spans(tokens: int, share: float, mean: float, rng: np.random.Generator) -> tuple[list[int], list[int]]:
    """The number of kept tokens before each span, and the lengths of the spans.

    Spans of length 0 are left out if the corrupted sequence would become longer than the original one.
    """
    remaining = max(1, round(share * tokens))
    lengths: list[int] = []
    while remaining:
        lengths.append(min(int(rng.poisson(mean)), remaining))
        remaining -= lengths[-1]
    total = sum(lengths)
    while len(lengths) > total:
        lengths.remove(0)
    starts = np.sort(rng.integers(tokens - total + 1, size=len(lengths)))
    return starts.tolist(), lengths


def infill_spans(ids: np.ndarray, mask: int, starts: list[int], lengths: list[int]) -> np.ndarray:
    """The ids with one mask instead of each span."""
    output, kept, position = [], 0, 0
    for start, length in zip(starts, lengths, strict=True):
        output += [ids[position : position + start - kept], [mask]]
        position, kept = position + start - kept + length, start
    return np.concatenate([*output, ids[position:]]).astype(np.int64)
