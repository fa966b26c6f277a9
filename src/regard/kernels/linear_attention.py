"""Causal linear attention: softmax's exp(q·k) replaced by φ(q)·φ(k), so that the past fits in one matrix.

    S_t = S_{t-1} + φ(k_t) v_tᵀ        z_t = z_{t-1} + φ(k_t)        out_t = S_tᵀ φ(q_t) / z_tᵀ φ(q_t)

Computed in chunks: inside a chunk as a masked product of queries and keys, across chunks through S and z. A chunk of
one token is the recurrence itself, so training and decoding are this one function. Documents reset the sums at their
first token; invalid tokens add nothing. Katharopoulos et al. 2020, "Transformers are RNNs".
"""

import torch
from torch import Tensor

from regard.kernels.autocast import without_autocast

CHUNK = 64  # the product inside a chunk costs CHUNK per token, the state E per token: about even for usual head sizes


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, segments: Tensor | None = None, valid: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """q, k (B, H, L, E) already mapped by φ, v (B, H, L, E); state (B, H, E, E + 1) holds S and, as last column, z.

    Returns out (B, H, L, E) and the state after the last token.
    """
    wide = state.dtype
    q, k = q.to(wide), k.to(wide)
    v = torch.cat([v.to(wide), torch.ones_like(v[..., :1], dtype=wide)], -1)  # (B, H, L, E + 1): z rides along
    if valid is not None:
        k = k * valid[:, None, :, None]
    outs = []
    with without_autocast(q.device):
        for start in range(0, q.shape[2], CHUNK):
            chunk = slice(start, start + CHUNK)
            q_c, k_c, v_c = q[:, :, chunk], k[:, :, chunk], v[:, :, chunk]
            scores = (q_c @ k_c.transpose(-1, -2)).tril()  # (B, H, C, C)
            if segments is None:
                outs.append(q_c @ state + scores @ v_c)
            else:
                before = segments[:, start - 1] if start else segments[:, 0]  # (B,) the document that the state holds
                own = segments[:, chunk]  # (B, C)
                scores = scores * (own.unsqueeze(-1) == own.unsqueeze(-2)).unsqueeze(1)
                goes_on = (own == before.unsqueeze(-1))[:, None, :, None]
                outs.append((q_c @ state) * goes_on + scores @ v_c)
                state = state * goes_on[:, :, -1:]
                k_c = k_c * (own == own[:, -1:])[:, None, :, None]
            state = state + k_c.transpose(-1, -2) @ v_c  # (B, H, E, E + 1)
    out, total = torch.cat(outs, 2).tensor_split([-1], -1)  # (B, H, L, E), (B, H, L, 1)
    return out / total.masked_fill(total == 0, 1.0), state  # a token that sees nothing gives zeros


def flops(head_dim: int, tokens: int) -> int:
    """Of one head's matrix products: between the tokens of a chunk, and with the state (once read, once added to)."""
    whole, rest = divmod(tokens, CHUNK)
    pairs = whole * CHUNK**2 + rest**2
    return 2 * pairs * (2 * head_dim + 1) + 4 * tokens * head_dim * (head_dim + 1)
