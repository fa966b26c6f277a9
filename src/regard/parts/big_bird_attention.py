"""BigBird's attention as its published models are evaluated (Zaheer et al. 2020): neighbouring, first and last blocks.

    a query in block r attends to key blocks c with |r - c| <= 1, c = 0 and c = last; queries in the first and the last
    block attend to all keys

In training `links` random key blocks are added per block of queries. In evaluation `transformers` uses the first block
for all of them, so it counts 1 + links times: log(1 + links) is added to its scores. In a document of at most
5 + 2·links blocks all queries attend to all keys. The pattern depends on the length of the document, so scores of all
pairs are computed. The mask `BigBird` is for new models: its links are drawn once, and only its pairs are computed.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.kernels.attention.arguments import ScoreOptions
from regard.kernels.attention.mask import Full, Mask
from regard.layout import Bias, TokenLayout
from regard.parts.attention import Attention, AttentionModule
from regard.parts.position.base import NoPosition
from regard.spec import require


@dataclass(frozen=True)
class BigBirdAttention(Attention):
    mask: Mask = Full()
    block: int = 64
    links: int = 3

    def check(self) -> None:
        super().check()
        require(
            self.mask == Full(),
            f"big_bird_attention: mask={self.mask} is not supported, because the blocks define the mask; leave it out",
        )
        require(
            self.position == NoPosition(),
            f"big_bird_attention: position={self.position} is not supported; set the position of the stack instead",
        )
        require(self.block > 0, f"big_bird_attention: block={self.block} must be positive")
        require(self.links >= 0, f"big_bird_attention: links={self.links} must not be negative")

    @property
    def bias_heads(self) -> int | None:
        return None

    def build(self, width: int) -> nn.Module:
        return BigBirdAttentionModule(width, self)


class BigBirdAttentionModule(AttentionModule):
    def __init__(self, width: int, spec: BigBirdAttention):
        super().__init__(width, spec)
        self.pattern_bias = BigBirdBias(spec.block, spec.links)

    def score_options(self, layout: TokenLayout) -> ScoreOptions:
        dropout = self.dropout if self.training else 0.0
        return ScoreOptions(self.mask, self.scale, self.pattern_bias, self.softcap, self.sinks, dropout)


@dataclass(frozen=True)
class BigBirdBias(Bias):
    """0 for an allowed pair, log(1 + links) for one that counts 1 + links times, -∞ for any other."""

    tiles = False
    block: int
    links: int

    @property
    def learned(self) -> bool:
        return False

    def values(self, layout: TokenLayout, dtype: torch.dtype) -> Tensor:
        return layout.derived(block_bias, self.block, self.links, dtype)


def block_bias(layout: TokenLayout, block: int, links: int, dtype: torch.dtype) -> Tensor:
    """(B, 1, L, S)"""
    lengths = query_document_lengths(layout).unsqueeze(-1)  # (B, L, 1)
    row, column = layout.positions.unsqueeze(-1) // block, layout.key_positions.unsqueeze(-2) // block
    last = (lengths - 1) // block
    attends_to_all = (row == 0) | (row == last) | (lengths <= (5 + 2 * links) * block)
    allowed = attends_to_all | ((row - column).abs() <= 1) | (column == 0) | (column == last)  # (B, L, S)
    bias = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill(~allowed, float("-inf"))
    return bias.masked_fill(~attends_to_all & (column == 0), math.log1p(links)).unsqueeze(1)


def query_document_lengths(layout: TokenLayout) -> Tensor:
    """(B, L): the number of tokens in each query's document."""
    ends = layout.key_positions.unsqueeze(-2) + 1  # (B, 1, S)
    if layout.key_valid is not None:
        ends = ends.where(layout.key_valid.unsqueeze(-2), 0)
    if layout.segments is not None and layout.key_segments is not None:
        ends = ends.where(layout.segments.unsqueeze(-1) == layout.key_segments.unsqueeze(-2), 0)  # (B, L, S)
    return ends.amax(-1).expand_as(layout.positions)
