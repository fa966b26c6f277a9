"""Packing: documents of any length into rows of one length, none seeing another.

A document of n tokens gives n-1 pairs (token, next token). A row holds several pieces, each a segment of its own with
positions from 0; what is left over is padding, with segment -1 and weight 0. A document with more pairs than a row is
cut into pieces that continue each other's pairs without loss; each piece starts again at position 0 and does not see
the one before, as if it were a document (so no position ever exceeds the row).

Rows are filled best-fit: the piece that has waited longest goes first, then always the longest that still fits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from regard.data.batch import Batch
from regard.data.sources import Document
from regard.text.chat import END
from regard.text.tokenizer import Tokenizer

PADDING = -1


@dataclass(frozen=True)
class DocumentSlice:
    """`ids[i + 1]` is to be predicted from `ids[: i + 1]`, its loss counted `weights[i + 1]` times."""

    ids: Sequence[int]
    weights: Sequence[float]

    def __len__(self) -> int:
        return max(0, len(self.ids) - 1)


def tokenize(document: Document, tokenizer: Tokenizer) -> DocumentSlice:
    ids: list[int] = []
    weights: list[float] = []
    for span in document:
        new = [marker(span.text, tokenizer)] if span.marker else tokenizer.encode(span.text)
        ids += new
        weights += [span.weight] * len(new)
    return DocumentSlice(ids, weights)


def marker(text: str, tokenizer: Tokenizer) -> int:
    """The one token of a marker; the end of a text is whatever the tokenizer calls it."""
    id = tokenizer.eos if text == END and tokenizer.eos is not None else tokenizer.core.token_to_id(text)
    if id is None:
        raise ValueError(
            f"the data has the marker {text}, which is no token of this tokenizer; train one (tokenizer.by='bpe'), "
            f"or use plain texts and a tokenizer with an end token"
        )
    return id


def cut(document: DocumentSlice, length: int) -> list[DocumentSlice]:
    """Pieces of at most `length` pairs; the last target of one is the first input of the next, so no pair is lost."""
    starts = range(0, len(document), length)
    return [DocumentSlice(document.ids[at : at + length + 1], document.weights[at : at + length + 1]) for at in starts]


def choose(lengths: Sequence[int], room: int) -> list[int]:
    """Which of the waiting pieces (oldest first) go into a row with `room`: the oldest, then the longest that fit."""
    chosen = [0]
    room -= lengths[0]
    for index in sorted(range(1, len(lengths)), key=lambda index: -lengths[index]):  # stable: ties keep their order
        if lengths[index] <= room:
            chosen.append(index)
            room -= lengths[index]
    return chosen


def collate(rows: Sequence[Sequence[DocumentSlice]], length: int, pad: int = 0) -> Batch:
    """Rows of pieces to a batch of (B, L) tensors."""
    return Batch(
        tokens=_tensor(rows, lambda piece, segment: piece.ids[:-1], length, pad, torch.long),
        targets=_tensor(rows, lambda piece, segment: piece.ids[1:], length, pad, torch.long),
        weights=_tensor(rows, lambda piece, segment: piece.weights[1:], length, 0.0, torch.float32),
        positions=_tensor(rows, lambda piece, segment: range(len(piece)), length, 0, torch.long),
        segments=_tensor(rows, lambda piece, segment: [segment] * len(piece), length, PADDING, torch.long),
    )


def _tensor(rows, values, length: int, padding: float, dtype: torch.dtype) -> torch.Tensor:
    filled = []
    for row in rows:
        line = [value for segment, piece in enumerate(row) for value in values(piece, segment)]
        filled.append(line + [padding] * (length - len(line)))
    return torch.tensor(filled, dtype=dtype)  # (B, L)
