"""Linear attention: softmax's exp(q·k) replaced by φ(q)·φ(k), so that the past fits in one matrix.

    S_t = Σ_{j≤t} φ(k_j) v_jᵀ        z_t = Σ_{j≤t} φ(k_j)        out_t = S_tᵀ φ(q_t) / z_tᵀ φ(q_t)

S and z are one scan (kernels/scan): z is S's last column, of values that are all 1. Where every token sees the whole
text, S and z are the sums over all of it. Katharopoulos et al. 2020, "Transformers are RNNs".
"""

import torch
from torch import Tensor

from regard.kernels.autocast import without_autocast
from regard.kernels.recurrent.linear_scan import scan
from regard.kernels.recurrent.linear_scan.triton import backend as triton


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    segments: Tensor | None = None,
    valid: Tensor | None = None,
    decay: Tensor | None = None,
    normalize: bool = True,
) -> tuple[Tensor, Tensor]:
    """q, k (B, H, L, N) already mapped by φ, v (B, H, L, P); state (B, H, N, P + 1) holds S and, as last column, z.

    Returns out (B, H, L, P) and the state after the last token. Where it is not to be normalized, the state has no z.
    """
    if not normalize:
        return scan(q, k, v, decay, state, segments, valid)
    case = (q, k, v, decay, state, segments, valid)
    if v.shape[2] > 1 and v.shape[3] % 2 == 0 and triton.refuses(*case) is None:
        # Its kernels read z beside S: with a column more, v and out would be copied.
        out, total, state = triton.scan_with_total(*case)
        return divided(out, total), state
    out, state = scan(q, k, with_ones(v), decay, state, segments, valid)
    return normalized(out), state


def both_ways(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Tensor | None = None,
    valid: Tensor | None = None,
    normalize: bool = True,
) -> Tensor:
    """The same with sums over a whole document, later tokens too: (B, H, L, P)."""
    wide = torch.promote_types(v.dtype, torch.float32)
    q, k, v = q.to(wide), k.to(wide), (with_ones(v) if normalize else v).to(wide)
    k = k if valid is None else k * valid[:, None, :, None]
    with without_autocast(q.device):
        if segments is None:
            out = q @ (k.mT @ v)
        else:
            empty = v.new_zeros(*k.shape[:2], k.shape[3], v.shape[3])
            before, _ = scan(q, k, v, None, empty, segments)
            after, _ = scan(q.flip(2), k.flip(2), v.flip(2), None, empty, segments.flip(1))
            out = before + after.flip(2) - (q * k).sum(-1, keepdim=True) * v  # itself is in both
    return normalized(out) if normalize else out


def with_ones(v: Tensor) -> Tensor:
    """(B, H, L, P) -> (B, H, L, P + 1): z rides along."""
    return torch.cat([v, torch.ones_like(v[..., :1])], -1)


def normalized(out: Tensor) -> Tensor:
    """(…, P + 1) -> (…, P): each divided by its last."""
    return divided(*out.tensor_split([-1], -1))


def divided(out: Tensor, total: Tensor) -> Tensor:
    """A token that sees nothing gives zeros."""
    return out / total.masked_fill(total == 0, 1.0)
