"""Body: what stands inside a sublayer, either a mixer (between tokens) or a feed-forward (within one).

A mixer's module takes (x, at, state); a feed-forward's takes x, or (x, at). It gives what is added to the stream, and
in training, where it has losses of its own (experts), also these: (y, {name: loss}). A body says how much it remembers
and computes, so that stores and the calculator need not know its kind.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from regard.parts.state import Memory
from regard.spec import Spec


@dataclass(frozen=True)
class Body(Spec):
    mixes: ClassVar[bool] = False  # does it look at other tokens?
    wants_at: ClassVar[bool] = False  # does it, though it mixes nothing, need to know which tokens are padding?

    @property
    def takes(self) -> int:
        """How many of (x, at, state) its module wants."""
        return 3 if self.mixes else 2 if self.wants_at else 1

    @property
    def causal(self) -> bool:
        """Does no token see a later one?"""
        return True

    @property
    def bias_heads(self) -> int | None:
        """For how many heads a stack's bias must have a number; None: it reads none."""
        return None

    @property
    def max_exact_cache(self) -> int | None:
        """How many tokens a cache may hold and still be exact: what its positions say, if it has any; None: no end."""
        position = getattr(self, "position", None)
        return None if position is None else position.max_exact_cache

    @property
    def max_keys(self) -> int | None:
        """The most keys that a query attends to, by default those of its mask; None: no bound."""
        mask = getattr(self, "mask", None)
        return None if mask is None else mask.max_keys

    def attention_sizes(self, width: int) -> tuple[int, int, int] | None:
        """(heads, kv_heads, head_dim) of its softmax attention; None: it has none."""
        return None

    def build(self, width: int) -> nn.Module:
        raise NotImplementedError

    def memory(self, width: int) -> Memory:
        """What it remembers between forwards."""
        return None

    def flops(self, width: int, tokens: int, seen: int) -> int:
        """Floating-point operations of the matrix products of one forward: this many tokens, each before `seen` keys.

        A multiply and an add are two. A masked product counts in full, as flop counters count it.
        """
        raise NotImplementedError(f"{type(self).__name__} does not count its FLOPs; define flops() to plan it")

    def inactive_params(self, width: int, tokens: int = 1) -> int:
        """Parameters that none of this many tokens uses: those of experts that no token is routed to.

        For several tokens it is the expected number when all experts are chosen equally often.
        """
        return 0
