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
    """log φ(x): (…, E) -> (…, R), in at least float32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    x = x.to(wide) * x.shape[-1] ** -0.25
    with without_autocast(x.device):
        projected = x @ directions.to(wide).mT
    return projected - x.square().sum(-1, keepdim=True) / 2


def running_peak(logs: Tensor, peak: Tensor, documents: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The running maximum over tokens and features of logs (B, H, L, R), and the log decay that it causes.

    exp(logs - maximum) is at most 1. When the maximum grows, a sum of such terms is multiplied by exp(log_decay), like
    the state of a scan. `peak` (B, H) is the maximum of all earlier tokens, -inf if there are none. Every document
    (B, L) has a separate maximum; the first document continues from `peak`. Returns the maxima (B, H, L), with 0 for
    -inf, the log decays (B, H, L), 0 after a maximum of -inf, and the last maximum (B, H).
    """
    maxima, peak = logs.detach().amax(-1), peak.unsqueeze(-1)  # (B, H, L), (B, H, 1)
    if documents is None:
        maxima = maxima.cummax(-1).values.maximum(peak)
        previous = torch.cat([peak, maxima[..., :-1]], -1)
    else:
        documents = documents.unsqueeze(1)  # (B, 1, L)
        distance = 1
        while distance < maxima.shape[-1]:
            earlier = maxima[..., :-distance].where(documents[..., distance:] == documents[..., :-distance], -torch.inf)
            maxima = torch.cat([maxima[..., :distance], maxima[..., distance:].maximum(earlier)], -1)
            distance *= 2
        maxima = maxima.maximum(peak.where(documents == documents[..., :1], -torch.inf))
        continues = documents[..., 1:] == documents[..., :-1]
        previous = torch.cat([peak, maxima[..., :-1].where(continues, -torch.inf)], -1)
    log_decay = (previous - maxima).where(previous > -torch.inf, 0.0)
    return maxima.masked_fill(maxima == -torch.inf, 0.0), log_decay, maxima[..., -1]


def document_peak(logs: Tensor, documents: Tensor | None = None) -> Tensor:
    """(B, H, L): the maximum of (B, H, L, R) over the document of each token; 0 if it is -inf."""
    no_peak = logs.new_full(logs.shape[:2], -torch.inf)
    up_to, _, _ = running_peak(logs, no_peak, documents)
    from_token, _, _ = running_peak(logs.flip(2), no_peak, None if documents is None else documents.flip(1))
    return up_to.maximum(from_token.flip(2))


def softmax_error(q: Tensor, k: Tensor, directions: Tensor) -> Tensor:
    """(…, L): the total variation distance of the estimated weights from softmax, per query, from 0 to 1."""
    exact = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)  # (…, L, S)
    logs_q, logs_k = log_features(q, directions), log_features(k, directions)
    logs_k = logs_k - logs_k.amax((-2, -1), keepdim=True)
    weights = (logs_q - logs_q.amax(-1, keepdim=True)).exp() @ logs_k.exp().mT
    estimate = weights / weights.sum(-1, keepdim=True)
    return (estimate - exact).abs().sum(-1) / 2
