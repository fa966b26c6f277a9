"""Positive random features: softmax attention as linear attention, in the mean over directions drawn at random.

    exp(q·k / √E) = E_w[φ_w(q) φ_w(k)],     φ_w(x) = exp(w·x' - |x'|²/2),   x' = x / E^¼,   w normal

R directions give an unbiased estimate whose error falls like 1/√R; its matrix of weights has rank R at most, so it is
softmax only in the limit. Directions at right angles to each other spread less (FAVOR+). Choromanski et al. 2020,
"Rethinking Attention with Performers". What the features say is kept in logarithms: exp would overflow.
"""

import torch
from torch import Tensor, nn

from regard.kernels.autocast import without_autocast


def draw_directions(count: int, dim: int) -> Tensor:
    """(R, E): at right angles in blocks of E, each as long as a normal vector would be."""
    rows = torch.empty(count, dim)
    for block in rows.split(dim):
        nn.init.orthogonal_(block)
    return rows * torch.empty(count, dim).normal_().norm(dim=-1, keepdim=True)


def log_features(x: Tensor, directions: Tensor) -> Tensor:
    """log φ(x): (…, E) -> (…, R), in float32 at least."""
    wide = torch.promote_types(x.dtype, torch.float32)
    x = x.to(wide) * x.shape[-1] ** -0.25
    with without_autocast(x.device):
        along = x @ directions.to(wide).mT
    return along - x.square().sum(-1, keepdim=True) / 2


def running_peak(logs: Tensor, peak: Tensor, documents: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The largest so far of (B, H, L, R), beginning with `peak` (B, H): what keeps exp(logs - it) within 0 and 1.

    A sum kept relative to it must fade by exp(decay) when it grows, which is a scan's decay. Returns the peaks
    (B, H, L), the decays (B, H, L) and the last peak. Before anything was seen it is -inf, and there nothing fades.
    Every document (B, L) has peaks of its own; the first goes on with `peak`.
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
    """(B, H, L): the largest of (B, H, L, R) in each token's document; 0 where there is none."""
    none = logs.new_full(logs.shape[:2], -torch.inf)
    before, _, _ = running_peak(logs, none, documents)
    after, _, _ = running_peak(logs.flip(2), none, None if documents is None else documents.flip(1))
    return before.maximum(after.flip(2))


def softmax_error(q: Tensor, k: Tensor, directions: Tensor) -> Tensor:
    """(…, L): how much of each query's weight the features put on other keys than softmax does, from 0 to 1."""
    exact = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)  # (…, L, S)
    logs_q, logs_k = log_features(q, directions), log_features(k, directions)
    logs_k = logs_k - logs_k.amax((-2, -1), keepdim=True)
    weights = (logs_q - logs_q.amax(-1, keepdim=True)).exp() @ logs_k.exp().mT
    estimate = weights / weights.sum(-1, keepdim=True)
    return (estimate - exact).abs().sum(-1) / 2
