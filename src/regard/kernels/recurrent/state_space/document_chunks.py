"""Tokens of a batch laid out document by document, so that no convolution can reach over a border or into padding.

A row may hold several documents (`segments`) and tokens that are not there (`valid`). Every document becomes a line of
its own; where that would waste much room, for one long among many short ones, long ones are cut into several lines, of
which each goes on where the line before it ended.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

MOST = 256  # lines of one document: they are read one after another


@dataclass(frozen=True)
class DocumentChunks:
    tokens: Tensor  # (V,) the valid tokens' places in the flattened batch
    line: Tensor  # (V,) each one's line
    place: Tensor  # (V,) and its place there
    size: int  # places in a line
    sizes: Tensor  # (R,) tokens in each line
    rows: Tensor  # (R,) the row of the batch that a line is of
    level: Tensor  # (R,) which line of its document it is

    @property
    def levels(self) -> int:
        return int(self.level.max()) + 1

    @property
    def chained(self) -> bool:
        """Does a line go on where another ended?"""
        return self.levels > 1

    @property
    def first(self) -> Tensor:
        """(R,) is a line the first of its row?"""
        return torch.cat([torch.ones_like(self.rows[:1], dtype=torch.bool), self.rows[1:] != self.rows[:-1]])

    @property
    def last(self) -> Tensor:
        """(R,) is it the last?"""
        return self.first.roll(-1)

    def lay(self, u: Tensor) -> Tensor:
        """(B, L, D) -> (R, T, D), zeros behind a line's end"""
        laid = u.new_zeros(len(self.sizes), self.size, u.shape[-1])
        return laid.index_put((self.line, self.place), u.flatten(0, 1)[self.tokens])

    def back(self, y: Tensor, shape: tuple[int, int]) -> Tensor:
        """(R, T, D) -> (B, L, D), zeros where nothing is valid"""
        flat = y.new_zeros(shape[0] * shape[1], y.shape[-1])
        return flat.index_put((self.tokens,), y[self.line, self.place]).unflatten(0, shape)


def cut(shape: tuple[int, int], segments: Tensor | None, valid: Tensor | None) -> DocumentChunks:
    if valid is None:
        assert segments is not None, "rows of one whole document each need no cutting"
        valid = torch.ones_like(segments, dtype=torch.bool)
    row, column = valid.nonzero(as_tuple=True)  # (V,)
    document = torch.stack([row] if segments is None else [row, segments[row, column]])
    first = torch.ones_like(row, dtype=torch.bool)  # (V,) does a document begin?
    first[1:] = (document[:, 1:] != document[:, :-1]).any(0)
    steps = torch.arange(len(row), device=row.device)
    age = steps - torch.where(first, steps, 0).cummax(0).values  # (V,) tokens of the document before this one
    size = line_size(int(first.sum()), int(age.max()) + 1 if len(age) else 1, shape[0] * shape[1])
    begins = age % size == 0
    line = begins.cumsum(0) - 1
    sizes = torch.bincount(line, minlength=int(begins.sum()))
    return DocumentChunks(row * shape[1] + column, line, age % size, size, sizes, row[begins], age[begins] // size)


def line_size(documents: int, longest: int, tokens: int) -> int:
    """As long as the longest document, unless most of the room would then be empty; else a power of two."""
    if documents * longest <= 2 * tokens:
        return longest
    return 1 << max(tokens // documents, longest // MOST).bit_length()
