"""Positive random features: an unbiased estimate of softmax attention by linear attention.

    exp(q·k / √E) = E_w[φ_w(q) φ_w(k)],     φ_w(x) = exp(w·x' - |x'|²/2),   x' = x / E^¼,   w normal

With R directions w the error falls like 1/√R. The matrix of weights has rank at most R, so it equals softmax only in
the limit. Orthogonal directions have less variance (FAVOR+). Choromanski et al. 2020, "Rethinking Attention with
Performers". Features are kept as logarithms, since exp would overflow.
"""

import torch
from torch import Tensor, nn

from regard.kernels.autocast import without_autocast


def draw_directions(count: int, dim: int) -> Tensor:
    """(R, E): orthogonal in blocks of E, with the norms of normal vectors."""
    rows = torch.empty(count, dim)
    for block in rows.split(dim):
        nn.init.orthogonal_(block)
    return rows * torch.empty(count, dim).normal_().norm(dim=-1, keepdim=True)


def log_features(x: Tensor, directions: Tensor) -> Tensor:
    """log φ(x): (…, E) -> (…, R), in float32 at least."""
    wide = torch.promote_types(x.dtype, torch.float32)
    x = x.to(wide) * x.shape[-1] ** -0.25
    with without_autocast(x.device):
        projected = x @ directions.to(wide).mT
    return projected - x.square().sum(-1, keepdim=True) / 2


def running_peak(logs: Tensor, peak: Tensor, documents: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The running maximum of (B, H, L, R) from `peak` (B, H) on, so that exp(logs - maximum) is between 0 and 1.

    A sum that is relative to the maximum decays by exp(decay) when the maximum grows, like the state of a scan. Returns
    the maxima (B, H, L), the decays (B, H, L) and the last maximum. It is -inf before the first token, without decay.
    Every document (B, L) has maxima of its own; the first one continues from `peak`.
    """
    now, peak = logs.detach().amax(-1), peak.unsqueeze(-1)  # (B, H, L), (B, H, 1)
    if documents is None:
        now = now.cummax(-1).values.maximum(peak)
        before = torch.cat([peak, now[..., :-1]], -1)
    else:
        documents = documents.unsqueeze(1)  # (B, 1, L)
        reach = 1
        while reach < now.shape[-1]:
            early = now[..., :-reach].where(documents[..., reach:] == documents[..., :-reach], -torch.inf)
            now = torch.cat([now[..., :reach], now[..., reach:].maximum(early)], -1)
            reach *= 2
        now = now.maximum(peak.where(documents == documents[..., :1], -torch.inf))
        goes_on = documents[..., 1:] == documents[..., :-1]
        before = torch.cat([peak, now[..., :-1].where(goes_on, -torch.inf)], -1)
    decay = (before - now).where(before > -torch.inf, 0.0)
    return now.masked_fill(now == -torch.inf, 0.0), decay, now[..., -1]


def document_peak(logs: Tensor, documents: Tensor | None = None) -> Tensor:
    """(B, H, L): the maximum of (B, H, L, R) over the document of each token; 0 if it is -inf."""
    none = logs.new_full(logs.shape[:2], -torch.inf)
    before, _, _ = running_peak(logs, none, documents)
    after, _, _ = running_peak(logs.flip(2), none, None if documents is None else documents.flip(1))
    return before.maximum(after.flip(2))


def softmax_error(q: Tensor, k: Tensor, directions: Tensor) -> Tensor:
    """(…, L): the total variation distance of the estimated weights from softmax, per query, from 0 to 1."""
    exact = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)  # (…, L, S)
    logs_q, logs_k = log_features(q, directions), log_features(k, directions)
    logs_k = logs_k - logs_k.amax((-2, -1), keepdim=True)
    weights = (logs_q - logs_q.amax(-1, keepdim=True)).exp() @ logs_k.exp().mT
    estimate = weights / weights.sum(-1, keepdim=True)
    return (estimate - exact).abs().sum(-1) / 2
