"""A recurrence token by token: the plain form, which any step fits into.

h_t = step(x_t, h_{t-1})          h = 0 where a document begins; an invalid token changes nothing
"""

from collections.abc import Callable

import torch
from torch import Tensor

CellStates = tuple[Tensor, ...]  # each (B, N); the first is what the recurrence says
CellStep = Callable[..., CellStates]  # (x_t (B, …), *states) -> states


def unroll(
    step: CellStep, x: Tensor, past: CellStates, segments: Tensor | None = None, valid: Tensor | None = None
) -> tuple[Tensor, CellStates]:
    """x (B, L, …) -> what is said at every token (B, L, N), and the states after the last."""
    resets = None if segments is None else borders(segments, valid)  # (B, L)
    said = []
    for t in range(x.shape[1]):
        if resets is not None:
            past = tuple(state.masked_fill(resets[:, t, None], 0) for state in past)
        new = step(x[:, t], *past)
        past = new if valid is None else tuple(n.where(valid[:, t, None], p) for n, p in zip(new, past, strict=True))
        said.append(past[0])
    return torch.stack(said, 1), past


def borders(segments: Tensor, valid: Tensor | None) -> Tensor:
    """(B, L) True at a document's first valid token, but for a row's first document, which goes on with the past."""
    if valid is None:
        valid = torch.ones_like(segments, dtype=torch.bool)
    places = torch.arange(segments.shape[1], device=segments.device).expand_as(segments)
    latest = places.where(valid, -1).cummax(1).values  # the last valid token up to here
    before = torch.cat([torch.full_like(latest[:, :1], -1), latest[:, :-1]], 1)
    return valid & (before >= 0) & (segments != segments.gather(1, before.clamp_min(0)))
