"""The selective scan as a parallel prefix scan, because composition of the steps is associative.

A token maps h to a h + b, with a = exp(Δ A) and b = Δ B u. The composition of two such maps has the same form:

    (a₁, b₁) then (a₂, b₂)  =  (a₂ a₁, a₂ b₁ + b₂)

So the states after every second token are a scan over half as many pairs, and the others need one more step: O(n) work
in O(log n) dependent rounds (Blelloch 1990; Martin & Cundy 2018). It stores every state, L · F · N numbers per round,
so on a CPU it is slower than chunked.py; it is plain tensor algebra that autograd differentiates.
"""

import torch
from torch import Tensor

from regard.kernels.recurrent.selective_scan.inputs import prepared

ScanElement = tuple[Tensor, Tensor]  # a and b of h → a h + b


def refuses(*inputs: Tensor | None) -> str | None:
    return None


def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    state: Tensor,
    segments: Tensor | None = None,
    valid: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    u, delta, A, B, C = prepared(u, delta, A, B, C, state.dtype, valid, bias)
    a = (delta.unsqueeze(-1) * A).exp()  # (B, L, F, N)
    b = (delta * u).unsqueeze(-1) * B.unsqueeze(2)
    if segments is not None:
        resets = segments[:, 1:] != segments[:, :-1]
        a = torch.cat([a[:, :1], a[:, 1:].masked_fill(resets[..., None, None], 0.0)], 1)
    a = torch.cat([torch.ones_like(a[:, :1]), a], 1)  # the initial state is a first token
    b = torch.cat([state.unsqueeze(1), b], 1)
    h = associative_scan((a, b))[:, 1:]  # (B, L, F, N)
    y = (h * C.unsqueeze(2)).sum(-1)  # (B, L, F)
    return y if D is None else y + D.to(y.dtype) * u, h[:, -1]


def compose(first: ScanElement, second: ScanElement) -> ScanElement:
    """The first step followed by the second."""
    (a, b), (c, d) = first, second
    return c * a, c * b + d


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
