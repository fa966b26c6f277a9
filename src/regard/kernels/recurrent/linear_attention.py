"""Linear attention: exp(q·k) of softmax is replaced by φ(q)·φ(k), so that one matrix summarizes all previous tokens.

    S_t = Σ_{j≤t} φ(k_j) v_jᵀ        z_t = Σ_{j≤t} φ(k_j)        out_t = S_tᵀ φ(q_t) / z_tᵀ φ(q_t)

S and z are computed by one scan (linear_scan): z is the last column of S, for values that are all 1. Without a causal
mask S and z are sums over the whole document. Katharopoulos et al. 2020, "Transformers are RNNs".
"""

import torch
from torch import Tensor

from regard.kernels.autocast import without_autocast
from regard.kernels.recurrent.linear_scan import ScanInputs, scan, triton


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    segments: Tensor | None = None,
    valid: Tensor | None = None,
    log_decay: Tensor | None = None,
    normalize: bool = True,
) -> tuple[Tensor, Tensor]:
    """q, k (B, H, L, N) already mapped by φ, v (B, H, L, P); state (B, H, N, P + 1) holds S and, as last column, z.

    Returns out (B, H, L, P) and the state after the last token. Without normalization the state has no z.
    """
    inputs = ScanInputs(q, k, v, log_decay, state, segments, valid)
    if not normalize:
        return scan(inputs)
    if v.shape[2] > 1 and v.shape[3] % 2 == 0 and triton.unsupported_reason(inputs) is None:
        # The kernels take z as a separate tensor: one more column would copy v and out.
        out, total, state = triton.scan_with_total(inputs)
        return divide(out, total), state
    out, state = scan(ScanInputs(q, k, with_ones(v), log_decay, state, segments, valid))
    return divide_by_last(out), state


def bidirectional_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Tensor | None = None,
    valid: Tensor | None = None,
    normalize: bool = True,
) -> Tensor:
    """Linear attention without a causal mask, (B, H, L, P): the sums are over the whole document."""
    wide = torch.promote_types(v.dtype, torch.float32)
    q, k, v = q.to(wide), k.to(wide), (with_ones(v) if normalize else v).to(wide)
    k = k if valid is None else k * valid[:, None, :, None]
    with without_autocast(q.device):
        if segments is None:
            out = q @ (k.mT @ v)
        else:
            empty = v.new_zeros(*k.shape[:2], k.shape[3], v.shape[3])
            earlier, _ = scan(ScanInputs(q, k, v, None, empty, segments))
            later, _ = scan(ScanInputs(q.flip(2), k.flip(2), v.flip(2), None, empty, segments.flip(1)))
            out = earlier + later.flip(2) - (q * k).sum(-1, keepdim=True) * v  # the token itself is in both sums
    return divide_by_last(out) if normalize else out


def with_ones(v: Tensor) -> Tensor:
    """(B, H, L, P) -> (B, H, L, P + 1): the last column accumulates z."""
    return torch.cat([v, torch.ones_like(v[..., :1])], -1)


def divide_by_last(out: Tensor) -> Tensor:
    """(…, P + 1) -> (…, P): divide by the last column."""
    return divide(*out.tensor_split([-1], -1))


def divide(out: Tensor, total: Tensor) -> Tensor:
    """out / total; zeros for a query without keys."""
    return out / total.masked_fill(total == 0, 1.0)
