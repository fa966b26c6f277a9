"""Run documents of different lengths in one fused recurrence, each as a separate sequence that starts at step 1.

    step 1 processes the first token of every document, step 2 the second of those that have one, …

Padding is left out, and a row of many short documents takes only as many steps as its longest document.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from regard.kernels.recurrent.cells import CellStates
from regard.layout import TokenLayout

# (x (T, D), batch_sizes, past) -> outputs (T, N), states
Fused = Callable[[Tensor, Tensor, CellStates], tuple[Tensor, CellStates]]


class Documents(NamedTuple):
    """R documents, the longest first, packed step by step."""

    tokens: Tensor  # (T,) indices of their tokens in the flattened batch, step by step
    batch_sizes: Tensor  # number of documents per step; on the CPU, as torch requires
    rows: Tensor  # (R,) batch row of each document
    first: Tensor  # (R, 1) whether it is the first of its row, which continues the state
    last: Tensor  # (R,) whether it is the last of its row, whose state is returned


def pack_documents(layout: TokenLayout) -> Documents:
    indices, document, step, rows = document_steps(layout)
    order = document.bincount().argsort(descending=True, stable=True)  # (R,) the longest first
    rank = step * len(rows) + order.argsort()[document]  # (T,)
    no_row = rows.new_full((1,), -1)
    first, last = rows.diff(prepend=no_row) != 0, rows.diff(append=no_row) != 0
    return Documents(
        indices[rank.argsort()], step.bincount().cpu(), rows[order], first[order].unsqueeze(-1), last[order]
    )


def document_steps(layout: TokenLayout) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Per valid token its index in the batch, its document and its index there (T,); per document its row (R,)."""
    valid = torch.ones_like(layout.positions, dtype=torch.bool) if layout.valid is None else layout.valid
    indices = valid.flatten().nonzero().squeeze(1)  # (T,)
    row = indices // valid.shape[1]
    starts_document = row.diff(prepend=row.new_full((1,), -1)) != 0
    if layout.segments is not None:
        segment = layout.segments.flatten()[indices]
        starts_document = starts_document | (segment.diff(prepend=segment[:1]) != 0)
    document, starts = starts_document.cumsum(0) - 1, starts_document.nonzero().squeeze(1)
    return indices, document, torch.arange(len(indices), device=indices.device) - starts[document], row[starts]


def run_packed(fused: Fused, x: Tensor, past: CellStates, documents: Documents) -> tuple[Tensor, CellStates]:
    """x (B, L, D) -> the outputs at valid tokens (B, L, N), zeros at others, and the last states of every row."""
    tokens, batch_sizes, rows, first, last = documents
    if len(tokens) == 0:
        return x.new_zeros(*x.shape[:2], past[0].shape[1]), past
    initial = tuple(state[rows].where(first, 0.0) for state in past)  # (R, N)
    new, final = fused(x.flatten(0, 1)[tokens], batch_sizes, initial)  # (T, N), (R, N)
    outputs = new.new_zeros(x.shape[0] * x.shape[1], new.shape[1]).index_put((tokens,), new)
    past = tuple(old.index_put((rows[last],), end[last].to(old)) for old, end in zip(past, final, strict=True))
    return outputs.unflatten(0, x.shape[:2]), past


class DocumentRows(NamedTuple):
    """Maps rows (B, L) of several documents to rows (R, M) of one document each, and back."""

    shape: torch.Size  # B, L
    indices: Tensor  # (R, M) in the flattened batch
    valid: Tensor  # (R, M)
    rows: Tensor  # (R,) batch row of each document

    def split(self, x: Tensor) -> Tensor:
        """(B, L, …) -> (R, M, …)"""
        return x.flatten(0, 1)[self.indices]

    def merge(self, y: Tensor) -> Tensor:
        """(R, M, …) -> (B, L, …), zeros where there is no document"""
        empty = y.new_zeros(self.shape.numel(), *y.shape[2:])
        return empty.index_put((self.indices[self.valid],), y[self.valid]).unflatten(0, self.shape)


def split_documents(layout: TokenLayout) -> tuple[DocumentRows, TokenLayout]:
    """The map to one document per row, padded on the right, and the layout of these rows."""
    indices, document, step, rows = document_steps(layout)
    longest = int(step.max()) + 1 if len(step) else 1
    table = indices.new_full((len(rows), longest), -1).index_put((document, step), indices)  # (R, M)
    valid = table >= 0
    positions = torch.arange(table.shape[1], device=table.device).expand_as(table)
    document_layout = TokenLayout(positions.where(valid, 0), valid=valid, consecutive=True)
    return DocumentRows(layout.positions.shape, table.clamp_min(0), valid, rows), document_layout
