"""TokenLayout: position, document and validity of every token of a forward.

A position counts from the start of the token's own document, so it means the same in a packed training row, a padded
batch and a cached decode step. The keys of attention are the queries' own tokens, unless `keys` is set: with a cache,
or in cross-attention. Modules read all positions from the layout and compute no offsets themselves.

A layout is immutable, so tensors that depend on it alone (masks, rotation angles) are computed once, by `derived`. The
exception is the dictionary of auxiliary losses: in training every sublayer gets a new one and adds to it.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

# Scores (B, H, L, S) before the mask, the keys that the mask allows (B, 1, L, S) or None for all, learned sinks (H,) or
# None -> the keys that each query attends to (B, H, L, S). Attention calls it once per forward.
SelectKeys = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]


@dataclass(frozen=True, eq=False)
class TokenLayout:
    positions: Tensor  # (B, L) position of each token in its document, from 0
    segments: Tensor | None = None  # (B, L) document of each token: adjacent tokens, which attend only to one another
    valid: Tensor | None = None  # (B, L) False where the token is padding
    rows: Tensor | None = None  # (B,) row of the store for each batch row; None: batch row b is row b of the store
    keys: "TokenLayout | None" = None  # (B, S) layout of the keys; None: the keys are the queries' own tokens
    visible: tuple[Tensor, Tensor] | None = None  # (B, S) each, of keys: only queries at start ≤ i < end attend to them
    select: "SelectKeys | None" = None  # of keys: chooses among them per head, by their scores
    ordered: bool = False  # keys are the queries, positions 0 … L-1, one document, no padding
    consecutive: bool = False  # keys are the queries; valid tokens of a document are adjacent and in order
    inputs: "StackInputs" = field(default_factory=lambda: NO_INPUTS)
    _segments_checked: bool = field(default=False, repr=False, kw_only=True)  # copied by `replace`: checked once
    _derived: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.segments is None or self._segments_checked or torch.compiler.is_compiling():
            return
        if type(self.segments) is Tensor and self.segments.device.type == "cpu":  # elsewhere it would synchronize
            check_adjacent(self.segments if self.valid is None else self.derived(carry_segments))
            object.__setattr__(self, "_segments_checked", True)

    @classmethod
    def whole(cls, batch: int, length: int, device: torch.device | str | None = None) -> "TokenLayout":
        """Every row is one whole document, without padding and without cached keys."""
        return cls(torch.arange(length, device=device).expand(batch, length), ordered=True, consecutive=True)

    @classmethod
    def padded(cls, lengths: Sequence[int], device: torch.device | str | None = None) -> "TokenLayout":
        """Every row is one document of the given length, padded on the right to the longest."""
        if min(lengths) == max(lengths):
            return cls.whole(len(lengths), lengths[0], device)
        positions = torch.arange(max(lengths), device=device).expand(len(lengths), -1)
        valid = positions < torch.tensor(lengths, device=device).unsqueeze(1)
        return cls(positions.where(valid, 0), valid=valid, consecutive=True)

    def derived(self, function: Callable[..., Any], *args: Hashable) -> Any:
        """function(self, *args), computed once per layout and shared by all layers."""
        key = (function, *args)
        if key not in self._derived:
            self._derived[key] = function(self, *args)
        return self._derived[key]

    def with_keys(
        self,
        positions: Tensor,
        valid: Tensor | None = None,
        segments: Tensor | None = None,
        visible: tuple[Tensor, Tensor] | None = None,
        select: "SelectKeys | None" = None,
    ) -> "TokenLayout":
        """The same queries with other keys, (B, S) each."""
        return set_keys(self, TokenLayout(positions, segments, valid, visible=visible, select=select))

    def cross(self, source: "TokenLayout") -> "TokenLayout":
        """The same queries with the tokens of a source as keys; the stack's inputs do not apply to it."""
        return TokenLayout(self.positions, self.segments, self.valid, self.rows, keys=source)

    def with_source(self, source: "Source") -> "TokenLayout":
        """The same tokens with a source for cross-attention."""
        return replace(self, inputs=replace(self.inputs, source=source))

    def with_embeddings(self, embeddings: Tensor) -> "TokenLayout":
        return replace(self, inputs=replace(self.inputs, embeddings=embeddings))

    def with_losses(self, losses: dict[str, Tensor]) -> "TokenLayout":
        """The same tokens with a dictionary that `add_losses` adds to; everything derived so far is shared."""
        layout = replace(self, inputs=replace(self.inputs, losses=losses))
        object.__setattr__(layout, "_derived", self._derived)
        return layout

    def add_losses(self, losses: dict[str, Tensor]) -> None:
        """Add a body's auxiliary losses, by name, to those of its sublayer; outside of a sublayer they are dropped."""
        if (total := self.inputs.losses) is not None:
            total |= {name: total[name] + loss if name in total else loss for name, loss in losses.items()}

    def with_bias(self, bias: "Bias") -> "TokenLayout":
        return replace(self, inputs=replace(self.inputs, bias=bias))

    def tokens(self, index: slice) -> "TokenLayout":
        """Only these tokens of each row. If `keys` is set, all keys are kept."""
        return replace(
            self,
            positions=self.positions[:, index],
            segments=None if self.segments is None else self.segments[:, index],
            valid=None if self.valid is None else self.valid[:, index],
            ordered=False,
            consecutive=False,
        )

    def queries(self, index: slice) -> "TokenLayout":
        """Only these queries of each row, with all keys."""
        return self.with_keys(self.key_positions, self.key_valid, self.key_segments, self.key_visible).tokens(index)

    @property
    def documents(self) -> Tensor | None:
        """(B, L) segments in which a padding token belongs to the document of the last valid token before it."""
        if self.segments is None or self.valid is None:
            return self.segments
        return self.derived(carry_segments)

    @property
    def key_positions(self) -> Tensor:
        return self.positions if self.keys is None else self.keys.positions

    @property
    def key_segments(self) -> Tensor | None:
        return self.segments if self.keys is None else self.keys.segments

    @property
    def key_valid(self) -> Tensor | None:
        return self.valid if self.keys is None else self.keys.valid

    @property
    def key_visible(self) -> tuple[Tensor, Tensor] | None:
        return None if self.keys is None else self.keys.visible

    @property
    def key_select(self) -> "SelectKeys | None":
        return None if self.keys is None else self.keys.select


@dataclass(frozen=True, eq=False)
class Source:
    """A sequence that cross-attention attends to, such as an encoder's output."""

    x: Tensor  # (B, S, D)
    layout: TokenLayout


class Bias:
    """Numbers added to the scores of attention, computed from positions (kernels/attention/bias.py)."""

    tiles: ClassVar[bool] = True  # whether positions determine the bias; otherwise only `values` exists

    @property
    def learned(self) -> bool:
        """Whether it has weights, and so a gradient."""
        return True

    def tile(self, q_positions: Tensor, k_positions: Tensor, dtype: torch.dtype) -> Tensor:
        """Positions (…, l) and (…, s) -> (…, H, l, s), computed in at least float32."""
        raise NotImplementedError

    def values(self, layout: TokenLayout, dtype: torch.dtype) -> Tensor:
        """(B, H, L, S) for all queries and keys, or (B, 1, L, S) if all heads have the same bias."""
        return self.tile(layout.positions, layout.key_positions, dtype)


@dataclass(frozen=True, eq=False)
class StackInputs:
    """Inputs that every block of a stack can read beside the residual stream."""

    bias: Bias | None = None  # added to the scores of every attention of the stack
    embeddings: Tensor | None = None  # (B, L, D) input of the first block
    source: Source | None = None  # for cross-attention; None: its keys and values come from its state
    losses: dict[str, Tensor] | None = None  # in training: auxiliary losses of the sublayer that is running


NO_INPUTS = StackInputs()


def set_keys(layout: TokenLayout, keys: TokenLayout) -> TokenLayout:
    return replace(layout, keys=keys, ordered=False, consecutive=False)


def check_adjacent(documents: Tensor) -> None:
    """Raise ValueError if the tokens of a document are not adjacent in their row.

    Attention would connect the separate runs of a document, but a recurrence would reset between them.
    """
    steps = documents.diff(dim=1)
    if (steps >= 0).all():
        return
    runs, counts = ((x.diff(dim=1) != 0).sum(1) + 1 for x in (documents, documents.sort(1).values))
    if (runs > counts).any():
        row = int((runs > counts).int().argmax())
        raise ValueError(
            f"row {row} has {int(counts[row])} documents in {int(runs[row])} runs of tokens; the tokens of a "
            "document must be adjacent: sort the row by document, or give each run a different segment"
        )


def carry_segments(layout: TokenLayout) -> Tensor:
    """(B, L) segment of the last valid token up to each token; for leading padding, that of the first valid token."""
    segments, valid = layout.segments, layout.valid
    assert segments is not None and valid is not None
    indices = torch.arange(segments.shape[1], device=segments.device).expand_as(segments)
    latest = indices.where(valid, -1).cummax(1).values
    first = valid.to(torch.uint8).argmax(1, keepdim=True)
    return segments.gather(1, latest.where(latest >= 0, first))


def number_documents(segments: Tensor) -> Tensor:
    """(B, L) the documents of each row counted from 0; a new one starts where the segment changes."""
    return F.pad((segments[:, 1:] != segments[:, :-1]).cumsum(1), (1, 0))


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device; from pinned memory, so that the host does not wait for a GPU."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
