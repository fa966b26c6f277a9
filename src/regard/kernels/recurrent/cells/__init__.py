"""Recurrent cells h_t = f(x_t, h_{t-1}): `rnn`, `lstm` and `gru`, as one step and through torch's fused operations.

`unroll` applies a step token by token. It resets the state at document borders and skips invalid tokens, and it is the
reference for `documents`, which passes all documents of a batch to the fused operation as separate sequences.
"""

from collections.abc import Callable

import torch
from torch import Tensor

CellStates = tuple[Tensor, ...]  # each (B, N); the first is the output of the cell
CellStep = Callable[..., CellStates]  # (x_t (B, …), *states) -> states


def unroll(
    step: CellStep, x: Tensor, past: CellStates, segments: Tensor | None = None, valid: Tensor | None = None
) -> tuple[Tensor, CellStates]:
    """x (B, L, …) -> the output at every token (B, L, N), and the states after the last.

    h_t = step(x_t, h_{t-1}), with h = 0 where a document starts; invalid tokens leave the state unchanged.
    """
    resets = None if segments is None else document_starts(segments, valid)  # (B, L)
    outputs = []
    for t in range(x.shape[1]):
        if resets is not None:
            past = tuple(state.masked_fill(resets[:, t, None], 0) for state in past)
        new = step(x[:, t], *past)
        past = new if valid is None else tuple(n.where(valid[:, t, None], p) for n, p in zip(new, past, strict=True))
        outputs.append(past[0])
    return torch.stack(outputs, 1), past


def document_starts(segments: Tensor, valid: Tensor | None) -> Tensor:
    """(B, L) True at the first valid token of a document, except for the first document, which continues the state."""
    if valid is None:
        valid = torch.ones_like(segments, dtype=torch.bool)
    indices = torch.arange(segments.shape[1], device=segments.device).expand_as(segments)
    latest = indices.where(valid, -1).cummax(1).values  # the last valid token so far
    previous = torch.cat([torch.full_like(latest[:, :1], -1), latest[:, :-1]], 1)
    return valid & (previous >= 0) & (segments != segments.gather(1, previous.clamp_min(0)))
