"""Documents of all lengths through one fused recurrence: each is a sequence of its own, and all begin together.

    step 1 reads every document's first token, step 2 the second of those that have one, …

Padding is left out, and a row of many short documents takes only as many steps as the longest of them.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from regard.kernels.recurrent.cells.loop import CellStates
from regard.layout import TokenLayout

Fused = Callable[
    [Tensor, Tensor, CellStates], tuple[Tensor, CellStates]
]  # (x (T, D), sizes, past) -> said (T, N), states


class Documents(NamedTuple):
    """R documents, the longest first."""

    tokens: Tensor  # (T,) places of their tokens among all B · L, step by step
    sizes: Tensor  # how many documents have a token in each step; on the CPU, as torch wants it
    rows: Tensor  # (R,) where each stands
    first: Tensor  # (R, 1) is it its row's first, which goes on with the past?
    last: Tensor  # (R,) is it its row's last, which leaves its state behind?


def find(layout: TokenLayout) -> Documents:
    places, document, step, rows = walk(layout)
    order = document.bincount().argsort(descending=True, stable=True)  # (R,) the longest first
    turn = step * len(rows) + order.argsort()[document]  # (T,)
    nobody = rows.new_full((1,), -1)
    first, last = rows.diff(prepend=nobody) != 0, rows.diff(append=nobody) != 0
    return Documents(
        places[turn.argsort()], step.bincount().cpu(), rows[order], first[order].unsqueeze(-1), last[order]
    )


def walk(layout: TokenLayout) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Each valid token's place among all B · L, its document and its place there (T,); each document's row (R,)."""
    valid = torch.ones_like(layout.positions, dtype=torch.bool) if layout.valid is None else layout.valid
    places = valid.flatten().nonzero().squeeze(1)  # (T,)
    row = places // valid.shape[1]
    begins = row.diff(prepend=row.new_full((1,), -1)) != 0
    if layout.segments is not None:
        segment = layout.segments.flatten()[places]
        begins = begins | (segment.diff(prepend=segment[:1]) != 0)
    document, starts = begins.cumsum(0) - 1, begins.nonzero().squeeze(1)
    return places, document, torch.arange(len(places), device=places.device) - starts[document], row[starts]


def by_document(fused: Fused, x: Tensor, past: CellStates, documents: Documents) -> tuple[Tensor, CellStates]:
    """x (B, L, D) -> what is said at every valid token (B, L, N), zeros at others; and every row's last states."""
    tokens, sizes, rows, first, last = documents
    if len(tokens) == 0:
        return x.new_zeros(*x.shape[:2], past[0].shape[1]), past
    begun = tuple(state[rows].where(first, 0.0) for state in past)  # (R, N)
    new, ended = fused(x.flatten(0, 1)[tokens], sizes, begun)  # (T, N), (R, N)
    said = new.new_zeros(x.shape[0] * x.shape[1], new.shape[1]).index_put((tokens,), new)
    past = tuple(old.index_put((rows[last],), end[last].to(old)) for old, end in zip(past, ended, strict=True))
    return said.unflatten(0, x.shape[:2]), past


class Apart(NamedTuple):
    """Rows (B, L) of several documents as rows (R, M) of one each."""

    shape: torch.Size  # B, L
    places: Tensor  # (R, M) among all B · L
    valid: Tensor  # (R, M)
    rows: Tensor  # (R,) where each document stood

    def take(self, x: Tensor) -> Tensor:
        """(B, L, …) -> (R, M, …)"""
        return x.flatten(0, 1)[self.places]

    def put(self, y: Tensor) -> Tensor:
        """(R, M, …) -> (B, L, …), zeros where no document was"""
        empty = y.new_zeros(self.shape.numel(), *y.shape[2:])
        return empty.index_put((self.places[self.valid],), y[self.valid]).unflatten(0, self.shape)


def apart(layout: TokenLayout) -> tuple[Apart, TokenLayout]:
    """How to take documents apart, and where their tokens stand then: one document a row, padded on the right."""
    places, document, step, rows = walk(layout)
    longest = int(step.max()) + 1 if len(step) else 1
    table = places.new_full((len(rows), longest), -1).index_put((document, step), places)  # (R, M)
    valid = table >= 0
    positions = torch.arange(table.shape[1], device=table.device).expand_as(table)
    where = TokenLayout(positions.where(valid, 0), valid=valid, consecutive=True)
    return Apart(layout.positions.shape, table.clamp_min(0), valid, rows), where
