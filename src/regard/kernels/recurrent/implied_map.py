"""The implied attention matrices of linear mixers: the matrix M whose product with the values is the output.

    out_t = Σ_j M_tj v_j          linear attention, state spaces: M_tj = q_tᵀ (Π_{j<s≤t} diag a_s) k_j for j ≤ t

Such a mixer is linear in its values, so M is its output for one-hot values: one scan with L columns. There is no
softmax: M may have negative entries, and its rows need not sum to one. A mixer with a separate decay in each channel
has a matrix per channel; the mean of these over a group of channels is again one scan. Katharopoulos et al. 2020;
Ali et al. 2024, "The Hidden Attention of Mamba Models".
"""

import torch
from torch import Tensor

from regard.kernels.recurrent.linear_scan import ScanInputs, scan

MAX_GROUPS = 8


def channel_groups(channels: int) -> int:
    """The number of groups over whose channels a map is averaged: the largest divisor of `channels` up to 8."""
    return next(groups for groups in range(MAX_GROUPS, 0, -1) if channels % groups == 0)


def one_hot_values(batch: int, heads: int, like: Tensor) -> Tensor:
    """(B, H, L, L): the value of token j is the j-th unit vector; L is that of `like` (B, H, L, N)."""
    length = like.shape[2]
    wide = torch.promote_types(like.dtype, torch.float32)
    return torch.eye(length, dtype=wide, device=like.device).expand(batch, heads, length, length)


def scan_map(
    q: Tensor, k: Tensor, log_decay: Tensor | None, documents: Tensor | None, valid: Tensor | None, heads: int
) -> Tensor:
    """(B, H, L, L) of a linear scan; arguments as in ScanInputs, `heads`: the number of heads of the values."""
    v = one_hot_values(len(q), heads, k)
    state = v.new_zeros(len(q), heads, k.shape[-1], v.shape[-1])
    return scan(ScanInputs(q, k, v, log_decay, state, documents, valid))[0]


def mean_over_channels(
    q: Tensor, k: Tensor, log_decay: Tensor, groups: int, documents: Tensor | None, valid: Tensor | None
) -> Tensor:
    """(B, groups, L, L): the mean matrix of the channels of each group, from q, k and log_decay (B, L, F, N)."""
    q, k, log_decay = (x.unflatten(2, (groups, -1)).transpose(1, 2) for x in (q, k, log_decay))  # (B, G, L, F / G, N)
    return scan_map(
        q.flatten(3) / q.shape[3], k.flatten(3), log_decay.flatten(3), documents, valid, groups
    )  # the channels of a group are one long key


def token_distances(documents: Tensor | None, valid: Tensor | None, positions: Tensor) -> tuple[Tensor, Tensor]:
    """(B, L, L) number of valid tokens from key j to query t, and whether t reads j: earlier or the same, one document.

    Invalid tokens are no keys, and they do not count.
    """
    valid = torch.ones_like(positions, dtype=torch.bool) if valid is None else valid
    age = valid.long().cumsum(1)
    order = torch.arange(positions.shape[1], device=positions.device)
    reads = (order <= order.unsqueeze(-1)) & valid.unsqueeze(1)  # (B, L, L)
    if documents is not None:
        reads = reads & (documents.unsqueeze(1) == documents.unsqueeze(2))
    return age.unsqueeze(2) - age.unsqueeze(1), reads
