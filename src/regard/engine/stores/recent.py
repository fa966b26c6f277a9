"""The newest tokens of a quantized cache as they are, in a ring buffer beside it.

    query i reads key j    as it was computed    if i - recent < j ≤ i
                           from its codes        if j ≤ i - recent

Attention gets both copies of the newest keys, and the layout says which query attends to which copy. So the result does
not depend on the chunks in which tokens are computed. Liu et al. 2024, KIVI (arXiv:2402.02750).
"""

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.engine.stores.rows import KeyLayout, Storage
from regard.layout import TokenLayout
from regard.parts.state import State


class RecentStorage:
    placer = None  # those of its parts

    def __init__(self, quantized: Storage, newest: Storage, recent: int):
        self.parts, self.recent = (quantized, newest), recent
        self.arrays = quantized.arrays | newest.arrays

    def bind(self, layout: TokenLayout, placements: Mapping[Any, Any]) -> "RecentState":
        quantized, newest = (part.bind(layout, placements) for part in self.parts)
        return RecentState(quantized, newest, self.recent)


class RecentState(NamedTuple):
    quantized: State
    newest: State
    recent: int

    def pages(self, layout: TokenLayout, *names: str) -> None:
        return None

    def extend(self, layout: TokenLayout, **arrays: Tensor) -> tuple:
        *decoded, decoded_layout = self.quantized.extend(layout, **arrays)
        *newest, newest_layout = self.newest.extend(layout, **arrays)
        joined = (torch.cat(pair, 2) for pair in zip(decoded, newest, strict=True))
        return (*joined, decoded_layout.derived(join_keys, newest_layout, self.recent))


def join_keys(decoded: TokenLayout, newest: TokenLayout, recent: int) -> TokenLayout:
    """The layout with the decoded keys and then the newest; computed once for all layers."""
    positions = (decoded.key_positions, newest.key_positions)
    valid = (valid_keys(decoded), valid_keys(newest))
    never = torch.full_like(positions[0], sys.maxsize)
    start = torch.cat([positions[0] + recent, torch.zeros_like(positions[1])], 1)
    end = torch.cat([never, positions[1] + recent], 1)
    return KeyLayout(torch.cat(positions, 1), torch.cat(valid, 1), (start, end)).attach(decoded)


def valid_keys(layout: TokenLayout) -> Tensor:
    return torch.ones_like(layout.key_positions, dtype=torch.bool) if layout.key_valid is None else layout.key_valid
