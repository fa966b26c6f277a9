"""Attention masks: specs that decide from positions which keys a query may attend to.

`attention_mask` combines a mask with the layout of the tokens: a query attends to valid keys of its own document only.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from regard.kernels.attention.block_layout import BlockLayout
from regard.layout import TokenLayout
from regard.spec import Spec, require


@dataclass(frozen=True)
class Mask(Spec):
    relative: ClassVar[bool] = False  # whether the mask depends on the distance i - j alone

    @property
    def causal(self) -> bool:
        """Whether no query attends to a later key. Some masks have a field of this name."""
        raise NotImplementedError

    @property
    def sliding_window(self) -> int | None:
        """All allowed keys except the first tokens are among this many latest keys, the query's own included.

        None: there is no such limit.
        """
        return None

    @property
    def first_tokens(self) -> int:
        """The number of tokens at the start of a document that every later query attends to."""
        return 0

    @property
    def max_keys(self) -> int | None:
        """The largest number of keys that a query attends to; None: it grows with the sequence."""
        return None if self.sliding_window is None else self.sliding_window + self.first_tokens

    def allows(self, q: Tensor, k: Tensor) -> Tensor | None:
        """Positions (…, L, 1) and (…, 1, S) -> (…, L, S), or None if all pairs are allowed."""
        raise NotImplementedError

    def block_layouts(self, length: int) -> tuple[BlockLayout, ...]:
        """Block layouts that together contain all allowed pairs of a sequence of this length; empty: not sparse."""
        return ()


@dataclass(frozen=True)
class Causal(Mask):
    """A query attends to its own token and to earlier ones."""

    causal = True
    relative = True

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        return k <= q


@dataclass(frozen=True)
class Full(Mask):
    """Every query attends to every key."""

    causal = False
    relative = True

    def allows(self, q: Tensor, k: Tensor) -> None:
        return None


@dataclass(frozen=True)
class PrefixLM(Mask):
    """j <= i or j < p: bidirectional within the prefix, causal after it. Liu et al. 2018; Raffel et al. 2020.

    Tokens of the prefix attend to later ones, so the prefix has to be processed in one forward, and a decoder, which
    may append tokens one at a time, cannot have this mask.
    """

    causal = False

    prefix: int

    def check(self) -> None:
        require(self.prefix > 0, f"prefix_lm: prefix={self.prefix} must be positive; use causal for no prefix")

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) | (k < self.prefix)


def attention_mask(mask: Mask, layout: TokenLayout) -> Tensor | None:
    """(B, 1, L, S) True where the query attends to the key, computed once for all layers; None if all are allowed."""
    return layout.derived(compute_attention_mask, mask)


def compute_attention_mask(layout: TokenLayout, mask: Mask) -> Tensor | None:
    allowed = allowed_keys(mask, layout, slice(None), slice(None))  # (B, L, S)
    return None if allowed is None else allowed.unsqueeze(1)  # (B, 1, L, S)


def allowed_keys(
    mask: Mask, layout: TokenLayout, queries: slice, keys: slice, rows: slice = slice(None)
) -> Tensor | None:
    """(B, l, s) True where the query attends to the key; None if all pairs are allowed.

    rows: the rows of the positions; one row is enough if all rows have the same positions.
    """
    q, k = layout.positions[rows, queries], layout.key_positions[rows, keys]
    allowed = mask.allows(q.unsqueeze(-1), k.unsqueeze(-2))
    if layout.segments is not None and layout.key_segments is not None:
        same_document = layout.segments[:, queries].unsqueeze(-1) == layout.key_segments[:, keys].unsqueeze(-2)
        allowed = intersect(allowed, same_document)
    if layout.key_valid is not None:
        allowed = intersect(allowed, layout.key_valid[:, keys].unsqueeze(-2))
    if layout.key_visible is not None:
        start, end = (bound[:, keys].unsqueeze(-2) for bound in layout.key_visible)  # (B, 1, s)
        allowed = intersect(allowed, (start <= q.unsqueeze(-1)) & (q.unsqueeze(-1) < end))
    return allowed


def intersect(a: Tensor | None, b: Tensor) -> Tensor:
    return b if a is None else a & b
