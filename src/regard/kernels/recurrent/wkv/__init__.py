"""The recurrence of RWKV-4: per channel a mean of the values, weighted by exp(key), with a decay per channel.

    out_t = (Σ_{j<t} e^{(t-1-j) w + k_j} v_j + e^{u + k_t} v_t) / (Σ_{j<t} e^{(t-1-j) w + k_j} + e^{u + k_t})      w < 0

Both sums are stored relative to e^peak, their largest exponent, and merged as in online softmax, so nothing overflows.
Inside a chunk, sums over 1, 2, 4 … tokens are merged until each token has the sums over all previous tokens; between
chunks the sums are carried. On CUDA GPUs it runs in Triton (triton/). Peng et al. 2023, "RWKV: Reinventing RNNs for the
Transformer Era".
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.compat import cannot_run_triton
from regard.layout import number_documents

CHUNK, PORTION = 16, 1024  # tokens whose sums are merged by doubling; tokens processed at once
EMPTY = -1e38  # the exponent of an empty sum; finite, so that the difference of two is 0


class Sums(NamedTuple):
    """Σ e^{k - peak} v and Σ e^{k - peak} over a set of tokens; all arrays have one shape."""

    value: Tensor
    weight: Tensor
    peak: Tensor

    def merge(self, other: "Sums") -> "Sums":
        peak = torch.maximum(self.peak, other.peak)
        a, b = (self.peak - peak).exp(), (other.peak - peak).exp()
        return Sums(a * self.value + b * other.value, a * self.weight + b * other.weight, peak)

    def decay(self, log_factor: Tensor, keep: Tensor) -> "Sums":
        """The sums multiplied by e^log_factor where `keep` is True, empty elsewhere."""
        return Sums(self.value * keep, self.weight * keep, (self.peak + log_factor).where(keep, EMPTY))

    def tokens(self, selected: slice) -> "Sums":
        """The selected tokens of each chunk of (B, n, C, F)."""
        return Sums(*(x[:, :, selected] for x in self))

    def replace_after(self, count: int, others: "Sums") -> "Sums":
        """The first `count` tokens of each chunk, followed by the tokens of `others`."""
        return Sums(*(torch.cat([x[:, :, :count], y], 2) for x, y in zip(self, others, strict=True)))


class WKVInputs(NamedTuple):
    k: Tensor  # (B, L, F)
    v: Tensor  # (B, L, F)
    log_decay: Tensor  # w: (F,)
    bonus: Tensor  # u: (F,)
    state: Sums  # arrays (B, F)
    segments: Tensor | None = None  # (B, L): the state resets where they change
    valid: Tensor | None = None  # (B, L): invalid tokens leave the state unchanged


def wkv(inputs: WKVInputs) -> tuple[Tensor, Sums]:
    """out (B, L, F), and the state after the last token."""
    k, v, log_decay, bonus, state, segments, valid = inputs
    if k.shape[1] > 1 and state.peak.dtype == torch.float32 and cannot_run_triton(k.device) is None:
        from regard.kernels.recurrent.wkv.triton import autograd  # triton is optional

        return autograd.wkv(inputs)
    documents = torch.zeros_like(k[..., 0], dtype=torch.int64) if segments is None else number_documents(segments)
    updates = torch.ones_like(documents, dtype=torch.bool) if valid is None else valid
    parameters = log_decay.to(state.peak.dtype), bonus.to(state.peak.dtype)
    state_document, outs = documents[:, :1], []
    for portion in zip(*(x.split(PORTION, 1) for x in (k, v, documents, updates)), strict=True):
        out, state = run_portion(*portion, state_document, *parameters, state)
        state_document = portion[2][:, -1:]
        outs.append(out)
    return torch.cat(outs, 1), state


def run_portion(
    k: Tensor, v: Tensor, documents: Tensor, updates: Tensor, state_document: Tensor, log_decay: Tensor, bonus: Tensor,
    state: Sums,
) -> tuple[Tensor, Sums]:  # fmt: skip
    """out (B, L, F), and the state after the last token.

    `documents` and `updates` (B, L) are the document of each token, and whether the token updates the state;
    `state_document` (B, 1) is the document of the initial state.
    """
    dtype, length = state.peak.dtype, k.shape[1]
    size = min(CHUNK, length)
    padding = -length % size
    k, v = (F.pad(x.to(dtype), (0, 0, 0, padding)).unflatten(1, (-1, size)) for x in (k, v))  # (B, n, C, F)
    updates = F.pad(updates, (0, padding)).unflatten(1, (-1, size)).unsqueeze(-1)  # (B, n, C, 1)
    documents = torch.cat([documents, documents[:, -1:].expand(-1, padding)], 1).unflatten(1, (-1, size)).unsqueeze(-1)
    age = updates.cumsum(2)  # (B, n, C, 1) number of decays since the start of the chunk

    sums, distance = Sums(v * updates, updates.to(dtype).expand_as(v), k.where(updates, EMPTY)), 1
    while distance < size:
        late, early = slice(distance, None), slice(None, -distance)
        log_factor = (age[:, :, late] - age[:, :, early]) * log_decay
        keep = documents[:, :, late] == documents[:, :, early]
        sums = sums.replace_after(distance, sums.tokens(late).merge(sums.tokens(early).decay(log_factor, keep)))
        distance *= 2

    last = documents[:, :, -1:]  # (B, n, 1, 1)
    # (B, n, 1, 1): the document of the state before each chunk
    state_document = torch.cat([state_document.view(-1, 1, 1, 1), last[:, :-1]], 1)
    carried = []
    ends = *sums, age * log_decay, last == state_document
    for *chunk_sums, log_factor, keep in zip(*(x[:, :, -1].unbind(1) for x in ends), strict=True):
        carried.append(state)
        state = Sums(*chunk_sums).merge(state.decay(log_factor, keep))
    past = Sums(*(torch.stack(x, 1).unsqueeze(2) for x in zip(*carried, strict=True)))  # (B, n, 1, F)

    past = past.decay((age - updates.to(age.dtype)) * log_decay, documents == state_document)  # (B, n, C, F)
    continues = documents[:, :, 1:] == documents[:, :, :-1]
    inside = sums.tokens(slice(None, -1)).decay(torch.zeros_like(log_decay), continues)
    past = past.replace_after(1, past.tokens(slice(1, None)).merge(inside))
    out = past.merge(Sums(v, torch.ones_like(v), k + bonus))
    return (out.value / out.weight).flatten(1, 2)[:, :length], state
