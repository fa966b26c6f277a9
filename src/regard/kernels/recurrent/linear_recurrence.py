"""The elementwise linear recurrence as a parallel prefix scan: each channel has its own decay and input at every token.

    h_t = a_t ⊙ h_{t-1} + b_t

The composition of two such steps has the same form, and composition is associative:

    (a₁, b₁) then (a₂, b₂)  =  (a₂ a₁, a₂ b₁ + b₂)

So the states after every second token are a scan over half as many steps, and the others need one more step: O(n) work
in O(log n) dependent rounds. All states are stored, and autograd differentiates the scan. Blelloch 1990; Martin & Cundy
2018.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

ScanElement = tuple[Tensor, Tensor]  # a and b of h → a h + b


def linear_recurrence(
    a: Tensor, b: Tensor, state: Tensor, segments: Tensor | None = None, valid: Tensor | None = None
) -> Tensor:
    """a, b (B, L, F), state (B, F) -> h (B, L, F) after every token.

    The state resets where segments (B, L) change; invalid tokens (B, L) leave it unchanged.
    """
    if valid is not None:
        a, b = a.where(valid.unsqueeze(-1), 1.0), b.where(valid.unsqueeze(-1), 0.0)
    if segments is not None:
        resets = F.pad(segments[:, 1:] != segments[:, :-1], (1, 0))
        a = a.masked_fill(resets.unsqueeze(-1), 0.0)
    first = b[:, :1] + a[:, :1] * state.unsqueeze(1)
    return associative_scan((a, torch.cat([first, b[:, 1:]], 1)))


def associative_scan(steps: ScanElement) -> Tensor:
    """(B, L, …) steps -> the state after each, from 0."""
    a, b = steps
    length = b.shape[1]
    if length == 1:
        return b
    even, odd = (a[:, ::2], b[:, ::2]), (a[:, 1::2], b[:, 1::2])
    pairs = length // 2
    after_odd = associative_scan(compose((even[0][:, :pairs], even[1][:, :pairs]), odd))  # after tokens 1, 3, 5, …
    after_even = even[1][:, 1:] + even[0][:, 1:] * after_odd[:, : even[1].shape[1] - 1]  # after tokens 2, 4, 6, …
    after_even = torch.cat([even[1][:, :1], after_even], 1)
    states = torch.stack([after_even[:, :pairs], after_odd], 2).flatten(1, 2)
    return states if length == 2 * pairs else torch.cat([states, after_even[:, -1:]], 1)


def compose(first: ScanElement, second: ScanElement) -> ScanElement:
    """The first step followed by the second."""
    (a, b), (c, d) = first, second
    return c * a, c * b + d
