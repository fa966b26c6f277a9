"""Fixed filters: a linear system of steps, computed as a convolution over whole texts and as a recurrence in decoding.

    x_t = Ā x_{t-1} + B̄ u_t        y_t = C x_t                     the recurrence, O(1) a token; x_{-1} = 0
    y = K ∗ u                      K_k = C Ā^k B̄                   the convolution, by FFT in O(L log L)

The two are one function because Ā, B̄ and C depend on no token. A text that goes on from a state x adds what that state
says of itself, and leaves the state Ā^L x + Σ_j Ā^(L-1-j) B̄ u_j, both in closed form. Documents of a packed row are
convolved apart; what is not valid is not there at all. Gu et al. 2021, "Efficiently modeling long sequences with
structured state spaces".
"""

import torch
from torch import Tensor

from regard.kernels.autocast import without_autocast
from regard.kernels.recurrent.state_space.document_chunks import DocumentChunks, cut
from regard.kernels.recurrent.state_space.fft_convolution import convolve
from regard.kernels.recurrent.state_space.kernel import System, advanced, driven, kernel, response


def state_space(
    system: System, u: Tensor, state: Tensor | None = None, segments: Tensor | None = None, valid: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """u (B, L, D), the state before it (B, D, N) -> y (B, L, D), the state behind it; without one, no other."""
    with without_autocast(u.device):
        if u.shape[1] == 1 and state is not None:
            return step(system, u, state, valid)
        if segments is None and valid is None:
            return whole(system, u, state)
        return apart(system, u, state, segments, valid)


def step(system: System, u: Tensor, state: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """One token: the recurrence itself."""
    moved = system.transition @ state + system.b.to(u.dtype) * u.transpose(1, 2)  # (B, D, N)
    y = (system.c.to(u.dtype) * moved).sum(-1).unsqueeze(1)  # (B, 1, D)
    return y, moved if valid is None else moved.where(valid.unsqueeze(-1), state)


def whole(system: System, u: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Texts as long as their rows."""
    y = convolved(system, u, state)
    if state is None:
        return y, None
    length = u.shape[1]
    steps = torch.full((len(u),), length, device=u.device)
    return y, advanced(system, state, steps, length) + driven(system, u.transpose(1, 2))


def convolved(system: System, u: Tensor, state: Tensor | None) -> Tensor:
    length, u = u.shape[1], u.transpose(1, 2)  # (B, D, L)
    y = convolve(u, kernel(system, length, u.dtype))  # (B, D, L)
    return (y if state is None else y + response(system, state, length)).transpose(1, 2)


def apart(
    system: System, u: Tensor, state: Tensor | None, segments: Tensor | None, valid: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Document by document; the first of a row goes on from the state, the others begin."""
    shape = u.shape[0], u.shape[1]
    pieces = cut(shape, segments, valid)
    if len(pieces.tokens) == 0:
        return torch.zeros_like(u), state
    lines = pieces.lay(u)  # (R, T, D)
    if state is None and not pieces.chained:
        return pieces.back(convolved(system, lines, None), shape), None
    own = driven(system, flush_right(lines.transpose(1, 2), pieces.sizes))  # (R, D, N) from nothing
    begins = beginnings(system, own, state, pieces)
    y = pieces.back(convolved(system, lines, begins), shape)
    if state is not None:
        last = pieces.last
        ends = advanced(system, begins[last], pieces.sizes[last], pieces.size) + own[last]
        state = state.index_put((pieces.rows[last],), ends)
    return y, state


def flush_right(u: Tensor, sizes: Tensor) -> Tensor:
    """(R, D, T): the zeros behind each line's end moved to its front."""
    places = (torch.arange(u.shape[-1], device=u.device) + sizes.unsqueeze(-1)) % u.shape[-1]  # (R, T)
    return u.gather(-1, places.unsqueeze(1).expand_as(u))


def beginnings(system: System, own: Tensor, state: Tensor | None, pieces: DocumentChunks) -> Tensor:
    """(R, D, N): the state before each line."""
    begins = torch.zeros_like(own)
    if state is not None:
        begins = state[pieces.rows].where(pieces.first.view(-1, 1, 1), begins)
    for level in range(1, pieces.levels):
        here = (pieces.level == level).nonzero().squeeze(-1)
        ahead = system.power(pieces.size.bit_length() - 1)  # lines that others go on from are full: a power of two
        before = (ahead @ begins[here - 1].double()).to(own.dtype) + own[here - 1]
        begins = begins.index_put((here,), before)
    return begins
