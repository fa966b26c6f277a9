"""Time-invariant state-space models: a linear system, as a convolution over a sequence or a recurrence in decoding.

    x_t = Ā x_{t-1} + B̄ u_t        y_t = C x_t                     recurrence, O(1) per token; x_{-1} = 0
    y = K ∗ u                      K_k = C Ā^k B̄                   convolution, by FFT in O(L log L)

Both compute the same function because Ā, B̄ and C do not depend on the token. With an initial state x the outputs also
contain the response C Ā^(t+1) x, and the final state is Ā^L x + Σ_j Ā^(L-1-j) B̄ u_j. Documents of a packed row are
convolved separately, without their invalid tokens. Gu et al. 2021, "Efficiently modeling long sequences with
structured state spaces".
"""

import torch
from torch import Tensor

from regard.compat import outside_graphs
from regard.kernels.autocast import without_autocast
from regard.kernels.recurrent.state_space.document_chunks import DocumentChunks, chunk_documents
from regard.kernels.recurrent.state_space.kernel import System, advanced, convolve, driven, kernel, response


def state_space(
    system: System, u: Tensor, state: Tensor | None = None, segments: Tensor | None = None, valid: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """u (B, L, D), initial state (B, D, N) -> y (B, L, D) and the final state, or None if no state was given."""
    with without_autocast(u.device):
        if u.shape[1] == 1 and state is not None:
            return step(system, u, state, valid)
        if segments is None and valid is None:
            return convolve_whole(system, u, state)
        return convolve_documents(system, u, state, segments, valid)


def step(system: System, u: Tensor, state: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """One step of the recurrence."""
    new_state = system.transition @ state + system.b.to(u.dtype) * u.transpose(1, 2)  # (B, D, N)
    y = (system.c.to(u.dtype) * new_state).sum(-1).unsqueeze(1)  # (B, 1, D)
    return y, new_state if valid is None else new_state.where(valid.unsqueeze(-1), state)


def convolve_whole(system: System, u: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Rows of one document each, without padding."""
    y = outputs(system, u, state)
    if state is None:
        return y, None
    length = u.shape[1]
    steps = torch.full((len(u),), length, device=u.device)
    return y, advanced(system, state, steps, length) + driven(system, u.transpose(1, 2))


def outputs(system: System, u: Tensor, state: Tensor | None) -> Tensor:
    length, u = u.shape[1], u.transpose(1, 2)  # (B, D, L)
    y = convolve(u, kernel(system, length, u.dtype))  # (B, D, L)
    return (y if state is None else y + response(system, state, length)).transpose(1, 2)


@outside_graphs
def convolve_documents(
    system: System, u: Tensor, state: Tensor | None, segments: Tensor | None, valid: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Each document separately; the first of a row continues the state, the others start from zeros."""
    shape = u.shape[0], u.shape[1]
    chunks = chunk_documents(shape, segments, valid)
    if len(chunks.tokens) == 0:
        return torch.zeros_like(u), state
    inputs = chunks.gather(u)  # (R, T, D)
    if state is None and not chunks.chained:
        return chunks.scatter(outputs(system, inputs, None), shape), None
    driven_states = driven(system, align_right(inputs.transpose(1, 2), chunks.lengths))  # (R, D, N) from a zero state
    initial = initial_states(system, driven_states, state, chunks)
    y = chunks.scatter(outputs(system, inputs, initial), shape)
    if state is not None:
        last = chunks.last
        final = advanced(system, initial[last], chunks.lengths[last], chunks.padded_length) + driven_states[last]
        state = state.index_put((chunks.rows[last],), final)
    return y, state


def align_right(u: Tensor, lengths: Tensor) -> Tensor:
    """(R, D, T): the padding of each chunk moved to its front."""
    indices = (torch.arange(u.shape[-1], device=u.device) + lengths.unsqueeze(-1)) % u.shape[-1]  # (R, T)
    return u.gather(-1, indices.unsqueeze(1).expand_as(u))


def initial_states(system: System, driven_states: Tensor, state: Tensor | None, chunks: DocumentChunks) -> Tensor:
    """(R, D, N): the state before each chunk."""
    initial = torch.zeros_like(driven_states)
    if state is not None:
        initial = state[chunks.rows].where(chunks.first.view(-1, 1, 1), initial)
    for i in range(1, chunks.max_chunks):
        indices = (chunks.index_in_document == i).nonzero().squeeze(-1)
        # A chunk with a successor is full, and its length is a power of two.
        power = system.power(chunks.padded_length.bit_length() - 1)
        before = (power @ initial[indices - 1].double()).to(driven_states.dtype) + driven_states[indices - 1]
        initial = initial.index_put((indices,), before)
    return initial
