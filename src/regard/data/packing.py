"""Packing: documents of any length in rows of one length, each attending only to itself.

A document of n tokens has n-1 pairs (token, next token). A row holds several document slices, each a segment with
positions from 0; the rest of the row is padding, with segment -1 and weight 0. A document with more pairs than a row
is sliced; no pair is lost, and each slice is treated like a document: its positions start at 0, and it does not attend
to the previous slice.

Rows are filled best-fit: first the oldest pending slice, then repeatedly the longest one that fits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from regard.data.batch import Batch
from regard.data.sources import Document
from regard.text.chat import END
from regard.text.tokenizer import Tokenizer

PADDING_SEGMENT = -1


@dataclass(frozen=True)
class DocumentSlice:
    """`ids[i + 1]` is predicted from `ids[: i + 1]`, and its loss is multiplied by `weights[i + 1]`."""

    ids: Sequence[int]
    weights: Sequence[float]

    def __len__(self) -> int:
        """The number of (token, next token) pairs."""
        return max(0, len(self.ids) - 1)


def tokenize(document: Document, tokenizer: Tokenizer) -> DocumentSlice:
    ids: list[int] = []
    weights: list[float] = []
    for span in document:
        new = [special_token_id(span.text, tokenizer)] if span.special else tokenizer.encode(span.text)
        ids += new
        weights += [span.weight] * len(new)
    return DocumentSlice(ids, weights)


def special_token_id(token: str, tokenizer: Tokenizer) -> int:
    """The id of a special token; `<|end|>` is the tokenizer's eos, if it has one."""
    id = tokenizer.eos if token == END and tokenizer.eos is not None else tokenizer.core.token_to_id(token)
    if id is None:
        raise ValueError(
            f"the data has the special token {token}, which is not in this tokenizer's vocabulary; train a tokenizer "
            "(tokenizer.by='bpe'), or use plain text and a tokenizer with an eos token"
        )
    return id


def slice_document(document: DocumentSlice, length: int) -> list[DocumentSlice]:
    """Slices of at most `length` pairs. The last target of a slice is the first token of the next one."""
    starts = range(0, len(document), length)
    return [DocumentSlice(document.ids[i : i + length + 1], document.weights[i : i + length + 1]) for i in starts]


def best_fit(lengths: Sequence[int], capacity: int) -> list[int]:
    """The indices of the slices that fill a row: the oldest, then the longest that fit; `lengths` is oldest first."""
    indices = [0]
    remaining = capacity - lengths[0]
    for index in sorted(range(1, len(lengths)), key=lambda index: -lengths[index]):  # stable: ties keep their order
        if lengths[index] <= remaining:
            indices.append(index)
            remaining -= lengths[index]
    return indices


def collate(rows: Sequence[Sequence[DocumentSlice]], length: int, pad: int = 0) -> Batch:
    """A batch of (B, L) tensors from rows of slices."""
    return Batch(
        tokens=_tensor(rows, lambda slice, segment: slice.ids[:-1], length, pad, torch.long),
        targets=_tensor(rows, lambda slice, segment: slice.ids[1:], length, pad, torch.long),
        weights=_tensor(rows, lambda slice, segment: slice.weights[1:], length, 0.0, torch.float32),
        positions=_tensor(rows, lambda slice, segment: range(len(slice)), length, 0, torch.long),
        segments=_tensor(rows, lambda slice, segment: [segment] * len(slice), length, PADDING_SEGMENT, torch.long),
    )


def _tensor(rows, values, length: int, padding: float, dtype: torch.dtype) -> torch.Tensor:
    padded = []
    for row in rows:
        flat = [value for segment, slice in enumerate(row) for value in values(slice, segment)]
        padded.append(flat + [padding] * (length - len(flat)))
    return torch.tensor(padded, dtype=dtype)  # (B, L)
