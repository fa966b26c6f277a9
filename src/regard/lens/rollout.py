"""Attention rollout (Abnar & Zuidema 2020): how much of each input token is mixed into each position, over all layers.

    R = Π_l (ρ I + (1 - ρ) mean_h A_h^l)         the later layers on the left

It treats the residual stream as a share ρ of every layer and ignores values and feed-forward layers, so it is a
summary of the maps, not of the computation. Implied matrices count by the size of their entries.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.lens.maps import relative_weights


def attention_rollout(maps: Sequence[Tensor | None], residual: float = 0.5) -> Tensor:
    """(…, L, L) from the maps (…, H, L, L) of `attention_maps`; rows sum to one. Layers without a map are left out."""
    if not 0 <= residual <= 1:
        raise ValueError(f"residual={residual} must be a share from 0 to 1")
    found = [relative_weights(weights).mean(-3) for weights in maps if weights is not None]
    if not found:
        raise ValueError("no layer has an attention map; a rollout needs at least one")
    identity = torch.eye(found[0].shape[-1], dtype=found[0].dtype, device=found[0].device)
    rollout = identity.expand_as(found[0])
    for weights in found:
        rollout = (residual * identity + (1 - residual) * weights) @ rollout
    return rollout
