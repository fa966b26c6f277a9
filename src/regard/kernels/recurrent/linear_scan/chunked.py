"""The linear scan in chunks: one masked product for the pairs of tokens inside a chunk, the state between chunks.

With c_i = Σ_{s≤i} log_decay_s summed from the first token of the chunk, and S the state before the chunk,

    out_i = Sᵀ (exp(c_i) q_i) + Σ_{j≤i} (q_i · exp(c_i - c_j) k_j) v_j
    S' = exp(c_C) S + Σ_j exp(c_C - c_j) k_j v_jᵀ

Every exponent is a sum of log decays, so none is positive. With one decay per key channel the pairs are not a single
product: the chunk is halved, the second half attends to the first one with decays relative to the border between them,
and both halves are halved again. The products of as many chunks as memory allows are computed at once; only the states
are computed in a loop. The chunk size changes the cost, not the result. Yang et al. 2023; Dao & Gu 2024.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.kernels.autocast import without_autocast
from regard.kernels.recurrent.linear_scan.sequential import ScanInputs, per_head
from regard.layout import number_documents

CHUNK = 64  # per token, the pairs cost CHUNK operations and the state N: about equal for usual sizes
MAX_NUMBERS = 1 << 22  # elements of a tensor that is processed at once
MIN_LOG_DECAY = -1e3  # its exp is 0 even in float64, and it does not absorb the other terms of a sum


def unsupported_reason(inputs: ScanInputs) -> str | None:
    return None


def scan(inputs: ScanInputs, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    q, k, v, log_decay, state, segments, valid = inputs
    batch, heads, length, _ = v.shape
    if log_decay is not None and log_decay.dim() == 4:
        q, k = per_head(q, v), per_head(k, v)
    groups = q.shape[1]
    q, k, v = (x.to(state.dtype) for x in (q, k, v))
    if valid is not None:
        k = k * valid[:, None, :, None]
    steps = None if log_decay is None else grouped(per_token(log_decay, length, valid), groups)
    constant = log_decay is not None and log_decay.dim() == 1 and valid is None  # all chunks decay equally
    documents = None if segments is None else number_documents(segments)
    q, k, v, state = (grouped(x, groups) for x in (q, k, v, state))  # (B, G, R, …); R = 1 for q and k
    outs = []
    portions = split_lengths(length, chunk, MAX_NUMBERS // max(1, batch * heads * chunk))
    parts = zip(portions, *(in_chunks(x, portions) for x in (q, k, v, steps)), strict=True)
    with without_autocast(q.device):
        for (start, stop, size), q_p, k_p, v_p, step in parts:
            c = None if step is None else step.cumsum(-2)  # (B or 1, G, R, n, C, 1 or N)
            c = c[:, :, :, :1] if c is not None and constant else c
            same = None if documents is None else SameDocument(documents, start, stop, size)
            out, state = scan_chunks(q_p, k_p, v_p, c, state, same)
            outs.append(out.flatten(3, 4))  # (B, G, R, L, P)
    return torch.cat(outs, 3).flatten(1, 2), state.flatten(1, 2)


def split_lengths(length: int, chunk: int, chunks: int) -> list[tuple[int, int, int]]:
    """(start, stop, chunk size) of portions of at most this many whole chunks; a shorter chunk comes last."""
    whole, step = length // chunk * chunk, max(1, chunks) * chunk
    portions = [(start, min(start + step, whole), chunk) for start in range(0, whole, step)]
    return [*portions, (whole, length, length - whole)] if whole < length else portions


def in_chunks(x: Tensor | None, portions: list[tuple[int, int, int]]) -> Sequence[Tensor | None]:
    """(B, G, R, L, ·) -> portions (B, G, R, n, C, ·)."""
    if x is None:
        return [None] * len(portions)
    lengths = [stop - start for start, stop, _ in portions]
    parts = x.split(lengths, 3)  # no slices: the gradient of a slice is as long as x
    return [part.unflatten(3, (-1, size)) for part, (_, _, size) in zip(parts, portions, strict=True)]


def scan_chunks(
    q: Tensor, k: Tensor, v: Tensor, c: Tensor | None, state: Tensor, same: "SameDocument | None"
) -> tuple[Tensor, Tensor]:
    """q, k (B, G, 1, n, C, N), v (B, G, R, n, C, P), c (…, n or 1, C, 1 or N), state (B, G, R, N, P)."""
    channels = c is not None and c.shape[-1] > 1
    if channels:
        out = attend_by_halves(q, k, v, c, same)
    else:
        scores = (q @ k.mT).tril() if c is None else (q @ k.mT) * pairs(c, v.dtype)  # (B, G, R or 1, n, C, C)
        out = (scores if same is None else scores * same.pairs) @ v
    read_factor = write_factor = carry_factor = None
    if c is not None:
        end = c[..., -1:, :]
        exponents = c, end - c, end.mT  # (…, C, ·), (…, C, ·), (…, ·, 1)
        read_factor, write_factor, carry_factor = (x.to(v.dtype).exp() for x in exponents)
    if same is not None:
        read_factor = scaled(same.reads_state, read_factor)
        write_factor = scaled(same.updates_state, write_factor)
        carry_factor = scaled(same.keeps_state, carry_factor)
    if channels:
        k, q = scaled(k, write_factor), scaled(q, read_factor)
    else:  # factors on values and outputs, so that the heads of a group share one product
        v = scaled(v, write_factor)
    updates = torch.einsum("bgncm,bgrncp->bgrnmp", k.squeeze(2), v)  # (B, G, R, n, N, P)
    initial = []
    for factor, update in zip(per_chunk(carry_factor, updates.shape[3]), updates.unbind(3), strict=True):
        initial.append(state)
        state = scaled(state, factor) + update
    from_state = torch.einsum("bgncm,bgrnmp->bgrncp", q.squeeze(2), torch.stack(initial, 3))  # (B, G, R, n, C, P)
    return out + (from_state if channels else scaled(from_state, read_factor)), state


def pairs(c: Tensor, dtype: torch.dtype) -> Tensor:
    """exp(c_i - c_j) for j ≤ i, else 0: (…, C, 1) -> (…, C, C)."""
    future = torch.ones(c.shape[-2], c.shape[-2], dtype=torch.bool, device=c.device).triu(1)
    return (c - c.mT).to(dtype).masked_fill(future, -torch.inf).exp()


def attend_by_halves(q: Tensor, k: Tensor, v: Tensor, c: Tensor, same: "SameDocument | None") -> Tensor:
    """Σ_{j≤i} (q_i · exp(c_i - c_j) k_j) v_j with c (…, C, N); chunks are padded to a power of two."""
    size = c.shape[-2]
    padding = (1 << (size - 1).bit_length()) - size
    q, k, v = (F.pad(x, (0, 0, 0, padding)) for x in (q, k, v))
    c = torch.cat([c, c[..., -1:, :].expand(*c.shape[:-2], padding, -1)], -2)
    out = (q * k).sum(-1, keepdim=True) * v  # the pairs of a token with itself
    half = 1
    while half < size:
        (_, q_late), (k_early, _), (v_early, _), (c_early, c_late) = (
            x.unflatten(-2, (-1, 2, half)).unbind(-3) for x in (q, k, v, c)
        )  # (…, C / 2h, h, ·)
        border = c_early[..., -1:, :]
        late = q_late * (c_late - border).to(q.dtype).exp()
        early = k_early * (border - c_early).to(k.dtype).exp()
        scores = late @ early.mT  # (…, C / 2h, h, h)
        if same is not None:
            scores = scores * same.halves(half, padding)
        added = scores @ v_early
        out = out + torch.stack([torch.zeros_like(added), added], -3).flatten(-4, -2)
        half *= 2
    return out[..., :size, :]


class SameDocument:
    """Masks for packed rows: which tokens of a chunk are of one document, and which share it with a state.

    A token reads the state before the chunk, or updates the state after it, only if both are of the same document. The
    state is kept over the chunk only if no document starts inside.
    """

    def __init__(self, documents: Tensor, start: int, stop: int, size: int):
        before = documents[:, max(start - 1, 0)].view(-1, 1, 1, 1, 1, 1)
        self.documents = documents[:, start:stop].unflatten(1, (-1, size))[
            :, None, None, :, :, None
        ]  # (B, 1, 1, n, C, 1)
        last = self.documents[..., -1:, :]  # (B, 1, 1, n, 1, 1)
        before = torch.cat([before, last[:, :, :, :-1]], 3)
        self.reads_state, self.updates_state = self.documents == before, self.documents == last
        self.keeps_state = last == before
        self.pairs = self.documents == self.documents.mT  # (B, 1, 1, n, C, C)

    def halves(self, half: int, padding: int) -> Tensor:
        """The pairs of the second with the first half, for halves of this size: (B, 1, 1, n, C / 2h, h, h)."""
        early, late = F.pad(self.documents, (0, 0, 0, padding)).unflatten(-2, (-1, 2, half)).unbind(-3)
        return late == early.mT


def per_token(log_decay: Tensor, length: int, valid: Tensor | None) -> Tensor:
    """(B or 1, H, L, 1 or N), 0 for invalid tokens; in float64, since differences of long sums are computed."""
    log_decay = log_decay.double().clamp_min(MIN_LOG_DECAY)
    if log_decay.dim() < 4:
        log_decay = log_decay.view(1, -1, 1).expand(1, -1, length) if log_decay.dim() == 1 else log_decay
        log_decay = log_decay.unsqueeze(-1)
    return log_decay if valid is None else log_decay * valid[:, None, :, None]


def per_chunk(factor: Tensor | None, chunks: int) -> Sequence[Tensor | None]:
    return [None] * chunks if factor is None else factor.expand(-1, -1, -1, chunks, -1, -1).unbind(3)


def grouped(x: Tensor, groups: int) -> Tensor:
    return x.unflatten(1, (groups, -1))


def scaled(x: Tensor, factor: Tensor | None) -> Tensor:
    return x if factor is None else x * factor


def flops(key_dim: int, value_dim: int, tokens: int, heads: int, groups: int, channels: bool) -> int:
    """FLOPs of the matrix products inside chunks, and of one update and one read of the state."""
    total = 4 * tokens * heads * key_dim * value_dim
    for _, _, size in split_lengths(tokens, CHUNK, 1):
        if channels:
            half, filled = 1, 1 << (size - 1).bit_length()
            while half < size:
                total += filled * half * heads * (key_dim + value_dim)
                half *= 2
        else:
            total += 2 * size * size * (groups * key_dim + heads * value_dim)
    return total
