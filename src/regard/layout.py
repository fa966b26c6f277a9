"""At: where the tokens of one forward stand.

A position is a token's place in its own document, so it means the same in a packed training row, a padded batch and a
cached decode. Attention compares the queries' side with the keys' side; they are one and the same until a state puts
remembered keys in front, and then only the keys' side changes. Everything is data: no module guesses an offset.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class TokenLayout:
    positions: Tensor  # (B, L) place of each token in its document, from 0
    segments: Tensor | None = None  # (B, L) document of each token; a token sees its own document only
    valid: Tensor | None = None  # (B, L) False where the token is padding
    rows: Tensor | None = None  # (B,) each batch row's row in the store; None: row b is row b
    k_positions: Tensor | None = None  # (B, S) the same three for the keys; None: the keys are the queries
    k_segments: Tensor | None = None
    k_valid: Tensor | None = None
    ordered: bool = False  # keys are the queries, positions 0 … L-1, one document, nothing invalid
    consecutive: bool = False  # keys are the queries; a document's valid tokens stand side by side, in their order
    bias: Any = None  # a Bias (kernels/attention) on the scores of every attention of the stack
    foot: Tensor | None = None  # (B, L, D) what entered the stack, for bodies that read it at every depth
    source: "Source | None" = None  # what cross-attention reads; None: what its state remembers
    shared: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def whole(cls, batch: int, length: int, device: torch.device | str | None = None) -> "TokenLayout":
        """Rows of one whole document each, nothing padded, nothing remembered."""
        return cls(torch.arange(length, device=device).expand(batch, length), ordered=True, consecutive=True)

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What every layer would compute alike (angles, masks) is computed by the first and kept for this forward."""
        if key not in self.shared:
            self.shared[key] = make()
        return self.shared[key]

    def with_keys(self, positions: Tensor, valid: Tensor | None = None) -> "TokenLayout":
        """The same queries before other keys: those that a state remembers of one document a row."""
        self.refuse_packed()
        return replace(self, k_positions=positions, k_valid=valid, ordered=False, consecutive=False, shared={})

    def refuse_packed(self) -> None:
        """Raise where rows hold several documents: a state remembers one."""
        if self.segments is not None:
            raise ValueError("packed documents cannot be remembered: a store keeps one document a row; give each a row")

    def before_source(self, source: "TokenLayout") -> "TokenLayout":
        """The same queries before the tokens of the source that cross-attention reads."""
        return TokenLayout(
            self.positions,
            self.segments,
            self.valid,
            self.rows,
            k_positions=source.positions,
            k_segments=source.segments,
            k_valid=source.valid,
        )

    def of_rows(self, rows: slice) -> "TokenLayout":
        """Only these queries, before the same keys."""
        return replace(
            self,
            positions=self.positions[:, rows],
            segments=None if self.segments is None else self.segments[:, rows],
            valid=None if self.valid is None else self.valid[:, rows],
            k_positions=self.key_positions,
            k_segments=self.key_segments,
            k_valid=self.key_valid,
            ordered=False,
            consecutive=False,
            shared={},
        )

    @property
    def documents(self) -> Tensor | None:
        """Segments as a recurrence wants them: a token that is not valid belongs to the document that it stands in."""
        segments, valid = self.segments, self.valid
        if segments is None or valid is None:
            return segments
        return self.once("documents, padding inside", lambda: carry_segments(segments, valid))

    @property
    def key_positions(self) -> Tensor:
        return self.positions if self.k_positions is None else self.k_positions

    @property
    def key_segments(self) -> Tensor | None:
        return self.segments if self.k_positions is None else self.k_segments

    @property
    def key_valid(self) -> Tensor | None:
        return self.valid if self.k_positions is None else self.k_valid


def carry_segments(segments: Tensor, valid: Tensor) -> Tensor:
    """(B, L): each token has the segment of the last valid one up to it; those before any, of the first."""
    places = torch.arange(segments.shape[1], device=segments.device).expand_as(segments)
    latest = places.where(valid, -1).cummax(1).values
    first = valid.to(torch.uint8).argmax(1, keepdim=True)
    return segments.gather(1, latest.where(latest >= 0, first))


@dataclass(frozen=True, eq=False)
class Source:
    """Another sequence that the tokens look at: an encoder's output, and where its tokens stand."""

    x: Tensor  # (B, S, D)
    layout: TokenLayout
