"""Masks are data: a spec that says which key positions a query position sees.

`visible` joins it with what the tokens themselves say: documents do not see each other, padding is not seen.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from regard.kernels.attention.block_layout import BlockLayout
from regard.layout import TokenLayout
from regard.spec import Spec


@dataclass(frozen=True)
class Mask(Spec):
    relative: ClassVar[bool] = False  # does the distance i - j alone decide?

    @property
    def causal(self) -> bool:
        """Does no token see a later one? Some masks have it as a field."""
        raise NotImplementedError

    @property
    def near(self) -> int | None:
        """How far back a token sees, itself counted, beside the first ones; None: no end."""
        return None

    @property
    def first(self) -> int:
        """How many tokens at the beginning are seen from everywhere."""
        return 0

    @property
    def max_keys(self) -> int | None:
        """The most keys that a query attends to; None: it grows with the sequence."""
        return None if self.near is None else self.near + self.first

    def allows(self, q: Tensor, k: Tensor) -> Tensor | None:
        """Positions (…, L, 1) and (…, 1, S) -> (…, L, S), or None when everything is seen."""
        raise NotImplementedError

    def folds(self, length: int) -> tuple[BlockLayout, ...]:
        """Where in a text this long the few keys stand that are seen (fold.py); empty: all are needed."""
        return ()


@dataclass(frozen=True)
class Causal(Mask):
    """A token sees itself and what came before it."""

    causal = True
    relative = True

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        return k <= q


@dataclass(frozen=True)
class Full(Mask):
    """Every token sees every token."""

    causal = False
    relative = True

    def allows(self, q: Tensor, k: Tensor) -> None:
        return None


def visible(mask: Mask, layout: TokenLayout) -> Tensor | None:
    """(B, 1, L, S) True where the query sees the key; None when all see all. Computed once for all layers alike."""
    return layout.derived(join, mask)


def join(layout: TokenLayout, mask: Mask) -> Tensor | None:
    seen = mask.allows(layout.positions.unsqueeze(-1), layout.key_positions.unsqueeze(-2))  # (B, L, S)
    if layout.segments is not None and layout.key_segments is not None:
        seen = both(seen, layout.segments.unsqueeze(-1) == layout.key_segments.unsqueeze(-2))
    if layout.key_valid is not None:
        seen = both(seen, layout.key_valid.unsqueeze(-2))
    return None if seen is None else seen.unsqueeze(1)  # (B, 1, L, S)


def both(a: Tensor | None, b: Tensor) -> Tensor:
    return b if a is None else a & b
