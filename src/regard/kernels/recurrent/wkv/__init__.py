"""RWKV's recurrence: every channel remembers a mean of its values, weighted by exp(key), fading at a rate of its own.

    out_t = (Σ_{j<t} e^{(t-1-j) w + k_j} v_j + e^{u + k_t} v_t) / (Σ_{j<t} e^{(t-1-j) w + k_j} + e^{u + k_t})      w < 0

Both sums are kept relative to e^peak, their largest exponent, and joined as in online softmax: nothing overflows. In
chunks: inside, sums over 1, 2, 4 … tokens are joined until each token has all before it; from chunk to chunk the sums
are carried. On CUDA GPUs spans.py does it in Triton. Peng et al. 2023, "RWKV: Reinventing RNNs for the Transformer Era"
(its fourth version).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.compat import cannot_triton
from regard.kernels.recurrent.wkv.sums import EMPTY, Sums
from regard.kernels.segments import numbered

CHUNK, PIECE = 16, 1024  # tokens whose sums are joined by doubling; tokens whose sums are held at once


def wkv(
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    bonus: Tensor,
    state: Sums,
    segments: Tensor | None = None,
    valid: Tensor | None = None,
) -> tuple[Tensor, Sums]:
    """k, v (B, L, F), decay = w and bonus = u (F,), the state's arrays (B, F) -> out (B, L, F), the state after.

    It begins anew where segments (B, L) change; tokens that are not valid (B, L) neither add nor fade.
    """
    if k.shape[1] > 1 and state.peak.dtype == torch.float32 and cannot_triton(k.device) is None:
        from regard.kernels.recurrent.wkv.triton import autograd

        return autograd.wkv(k, v, decay, bonus, state, segments, valid)
    documents = torch.zeros_like(k[..., 0], dtype=torch.int64) if segments is None else numbered(segments)
    counted = torch.ones_like(documents, dtype=torch.bool) if valid is None else valid
    before, outs = documents[:, :1], []
    for piece in zip(*(x.split(PIECE, 1) for x in (k, v, documents, counted)), strict=True):
        out, state = run(*piece, before, decay.to(state.peak.dtype), bonus.to(state.peak.dtype), state)
        before = piece[2][:, -1:]
        outs.append(out)
    return torch.cat(outs, 1), state


def run(
    k: Tensor, v: Tensor, documents: Tensor, counted: Tensor, before: Tensor, decay: Tensor, bonus: Tensor, state: Sums
) -> tuple[Tensor, Sums]:
    """Tokens of `documents`, of which those that are `counted` add and fade; the state is of the document `before`."""
    dtype, length = state.peak.dtype, k.shape[1]
    size = min(CHUNK, length)
    fill = -length % size
    k, v = (F.pad(x.to(dtype), (0, 0, 0, fill)).unflatten(1, (-1, size)) for x in (k, v))  # (B, n, C, F)
    counted = F.pad(counted, (0, fill)).unflatten(1, (-1, size)).unsqueeze(-1)  # (B, n, C, 1)
    documents = torch.cat([documents, documents[:, -1:].expand(-1, fill)], 1).unflatten(1, (-1, size)).unsqueeze(-1)
    age = counted.cumsum(2)  # (B, n, C, 1) how often what stood before the chunk has faded

    sums, reach = Sums(v * counted, counted.to(dtype).expand_as(v), k.where(counted, EMPTY)), 1
    while reach < size:
        late, early = slice(reach, None), slice(None, -reach)
        by, kept = (age[:, :, late] - age[:, :, early]) * decay, documents[:, :, late] == documents[:, :, early]
        sums = sums.but_first(reach, sums.tokens(late).join(sums.tokens(early).fade(by, kept)))
        reach *= 2

    last = documents[:, :, -1:]  # (B, n, 1, 1)
    before = torch.cat([before.view(-1, 1, 1, 1), last[:, :-1]], 1)  # of what is carried into each chunk
    carried = []
    for *ended, by, kept in zip(*(x[:, :, -1].unbind(1) for x in (*sums, age * decay, last == before)), strict=True):
        carried.append(state)
        state = Sums(*ended).join(state.fade(by, kept))
    past = Sums(*(torch.stack(x, 1).unsqueeze(2) for x in zip(*carried, strict=True)))  # (B, n, 1, F)

    past = past.fade((age - counted.to(age.dtype)) * decay, documents == before)  # (B, n, C, F)
    inside = sums.tokens(slice(None, -1)).fade(torch.zeros_like(decay), documents[:, :, 1:] == documents[:, :, :-1])
    past = past.but_first(1, past.tokens(slice(1, None)).join(inside))
    out = past.join(Sums(v, torch.ones_like(v), k + bonus))
    return (out.value / out.weight).flatten(1, 2)[:, :length], state
