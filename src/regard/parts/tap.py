"""Taps, the taps of attention, and the interface by which the lens gets attention maps.

A tap is an identity module for a tensor that is not the output of a module. A hook on it reads the tensor and can
replace it. It has no weights, so checkpoints do not contain it.

An attention has the taps `scores` (B, H, L, S), after scale, cap, bias and mask (-inf for masked keys), and `pattern`,
the weights after the softmax. No fast kernel has these tensors. So they exist only while a hook reads one of the two
taps: then attention is computed by its equation, and otherwise by its backend, as if there were no such taps.

A mixer whose weights can be recomputed from its taps, or from its input, implements `HasAttentionMap`; if they are not
softmax weights, its `map_kind` says what they are. A mixer without an (L, S) map sets `no_attention_map` to the reason.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from regard.kernels.attention import Attend
from regard.kernels.attention.arguments import Keys, ScoreOptions, gather_pages
from regard.kernels.attention.reference import attend_edited, normalize, normalize_edited
from regard.layout import TokenLayout


class Tap(nn.Identity):
    unavailable: str | None = None  # the reason why it must have no hook

    @property
    def hooked(self) -> bool:
        """Whether a hook reads this tap. A compiled forward has none: hooks run eagerly."""
        hooked = not torch.compiler.is_compiling() and bool(self._forward_hooks)
        if hooked and self.unavailable is not None:
            raise ValueError(f"this activation cannot be recorded or patched: {self.unavailable}")
        return hooked


class HasScoreTaps(Protocol):
    scores: Tap
    pattern: Tap


class Attends(HasScoreTaps, Protocol):
    attend: Attend


def attend_with_taps(
    module: Attends, q: Tensor, k: Keys, v: Keys, layout: TokenLayout, options: ScoreOptions
) -> Tensor:
    """`module.attend`; while a hook reads `scores` or `pattern`, the equation of attention with these taps."""
    if not is_tapped(module):
        return module.attend(q, k, v, layout, options)
    return attend_edited(q, gather_pages(k), gather_pages(v), layout, options, module.scores, module.pattern)


def normalize_with_taps(module: HasScoreTaps, s: Tensor, allowed: Tensor | None) -> Tensor:
    """The softmax of scores (B, H, L, S), with the taps if a hook reads one of them."""
    if not is_tapped(module):
        return normalize(s, allowed)
    return normalize_edited(s, allowed, module.scores, module.pattern)


def is_tapped(module: HasScoreTaps) -> bool:
    return module.scores.hooked or module.pattern.hooked


@dataclass(frozen=True)
class MapKind:
    """What the entries of a map are; an implied matrix is the one whose product with the values is the output."""

    mixer: str  # "linear attention"
    implied: bool = True  # False: softmax weights
    signed: bool = True  # entries may be negative
    normalized: bool = False  # rows sum to one; learned sinks take a share of a softmax
    channels: bool = False  # the mean over a group of channels, each of which has its own matrix

    @property
    def label(self) -> str:
        weights = "implied matrix" if self.implied else "softmax weights"
        return f"{self.mixer}, {weights}{', mean over channels' if self.channels else ''}"


SOFTMAX = MapKind("attention", implied=False, signed=False, normalized=True)


@runtime_checkable
class HasAttentionMap(Protocol):
    """`map_kind` is SOFTMAX unless the module has one."""

    heads: int
    attention_taps: tuple[str, ...]  # names of the taps that the map needs; "input" is the input of the module
    reads_source: bool  # the keys are those of a source

    def attention_map(self, taps: Mapping[str, Tensor], layout: TokenLayout, heads: slice = slice(None)) -> Tensor:
        """(B, heads, L, S) attention weights; `layout` is the one with which the module was called."""
        ...
