"""Split a batch into documents, so that a convolution crosses no document border and contains no padding.

A row may hold several documents (`segments`) and invalid tokens (`valid`). Every document becomes one chunk. If
padding all chunks to the longest document would waste much memory, long documents are split into several chunks, each
of which continues from the final state of the previous one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_CHUNKS = 256  # per document: they are processed one after another


@dataclass(frozen=True)
class DocumentChunks:
    """R chunks of T tokens each, padding included, which hold the M valid tokens of a batch."""

    tokens: Tensor  # (M,) indices of the valid tokens in the flattened batch
    chunk: Tensor  # (M,) chunk of each token
    index: Tensor  # (M,) index of the token in its chunk
    padded_length: int  # T
    lengths: Tensor  # (R,) tokens of each chunk, without padding
    rows: Tensor  # (R,) batch row of each chunk
    index_in_document: Tensor  # (R,) index of the chunk in its document

    @property
    def max_chunks(self) -> int:
        """The largest number of chunks of a document."""
        return int(self.index_in_document.max()) + 1

    @property
    def chained(self) -> bool:
        """Whether any document has several chunks."""
        return self.max_chunks > 1

    @property
    def first(self) -> Tensor:
        """(R,) whether a chunk is the first of its row."""
        return torch.cat([torch.ones_like(self.rows[:1], dtype=torch.bool), self.rows[1:] != self.rows[:-1]])

    @property
    def last(self) -> Tensor:
        """(R,) whether a chunk is the last of its row."""
        return self.first.roll(-1)

    def gather(self, u: Tensor) -> Tensor:
        """(B, L, D) -> (R, T, D), zeros after the end of a chunk"""
        gathered = u.new_zeros(len(self.lengths), self.padded_length, u.shape[-1])
        return gathered.index_put((self.chunk, self.index), u.flatten(0, 1)[self.tokens])

    def scatter(self, y: Tensor, shape: tuple[int, int]) -> Tensor:
        """(R, T, D) -> (B, L, D), zeros at invalid tokens"""
        flat = y.new_zeros(shape[0] * shape[1], y.shape[-1])
        return flat.index_put((self.tokens,), y[self.chunk, self.index]).unflatten(0, shape)


def chunk_documents(shape: tuple[int, int], segments: Tensor | None, valid: Tensor | None) -> DocumentChunks:
    """The chunks of all documents in a batch of this shape (B, L)."""
    if valid is None:
        assert segments is not None, "rows of one whole document each need no splitting"
        valid = torch.ones_like(segments, dtype=torch.bool)
    row, column = valid.nonzero(as_tuple=True)  # (M,)
    document = torch.stack([row] if segments is None else [row, segments[row, column]])
    first = torch.ones_like(row, dtype=torch.bool)  # (M,) whether a document starts here
    first[1:] = (document[:, 1:] != document[:, :-1]).any(0)
    steps = torch.arange(len(row), device=row.device)
    indices = steps - torch.where(first, steps, 0).cummax(0).values  # (M,) index in the document
    longest = int(indices.max()) + 1 if len(indices) else 1
    padded_length = chunk_length(int(first.sum()), longest, shape[0] * shape[1])
    starts = indices % padded_length == 0
    chunk = starts.cumsum(0) - 1
    lengths = torch.bincount(chunk, minlength=int(starts.sum()))
    tokens, index_in_document = row * shape[1] + column, indices[starts] // padded_length
    return DocumentChunks(
        tokens, chunk, indices % padded_length, padded_length, lengths, row[starts], index_in_document
    )


def chunk_length(documents: int, longest: int, tokens: int) -> int:
    """The length of the longest document; a power of two if chunks of that length would be mostly padding."""
    if documents * longest <= 2 * tokens:
        return longest
    return 1 << max(tokens // documents, longest // MAX_CHUNKS).bit_length()
