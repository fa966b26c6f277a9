"""Taps, and the interface by which the lens gets attention maps.

A tap is an identity module for a tensor that is not the output of a module. A hook on it reads the tensor and can
replace it. It has no weights, so checkpoints do not contain it.

An attention module whose weights can be recomputed from its taps implements `HasAttentionMap`. One that attends but has
no (L, S) map sets `no_attention_map` to the reason.
"""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from regard.layout import TokenLayout


class Tap(nn.Identity):
    @property
    def hooked(self) -> bool:
        """Whether a hook reads this tap. A compiled forward has none: hooks run eagerly."""
        return not torch.compiler.is_compiling() and bool(self._forward_hooks)


@runtime_checkable
class HasAttentionMap(Protocol):
    heads: int
    attention_taps: tuple[str, ...]  # names of the taps that the map needs, relative to the module
    reads_source: bool  # the keys are those of a source

    def attention_map(self, taps: Mapping[str, Tensor], layout: TokenLayout, heads: slice = slice(None)) -> Tensor:
        """(B, heads, L, S) attention weights; `layout` is the one with which the module was called."""
        ...
