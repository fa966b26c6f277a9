"""Body: the part inside a sublayer, a mixer (attention, recurrence, convolution) or a feed-forward layer.

Every body's module has one signature, and returns the tensor that the sublayer adds to the residual stream:

    forward(x, layout, state=STATELESS) -> Tensor          x and the output: (B, L, D)

A body that needs neither layout nor state ignores them. Auxiliary losses (experts) are added with `layout.add_losses`
in training. The spec declares the body's state and counts its FLOPs, so that stores and the planner need no table of
kinds.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from torch import nn

from regard.kernels.attention.mask import Mask
from regard.parts.state import Memory
from regard.spec import Spec, field_types


@dataclass(frozen=True)
class Body(Spec):
    mixes: ClassVar[bool] = False  # whether a token's output depends on other tokens

    @property
    def causal(self) -> bool:
        """Whether every token's output is independent of later tokens."""
        return True

    @property
    def bias_heads(self) -> int | None:
        """Heads that a bias shared by the stack (T5) must have; None: the body reads no shared bias."""
        return None

    @property
    def max_exact_cache(self) -> int | None:
        """Tokens up to which cached decoding is exact, as its positions declare; None: no limit."""
        position = getattr(self, "position", None)
        return None if position is None else position.max_exact_cache

    @property
    def max_keys(self) -> int | None:
        """The most keys that a query attends to, by default those of its mask; None: no limit."""
        mask = getattr(self, "mask", None)
        return None if mask is None else mask.max_keys

    def with_default_mask(self, mask: Mask) -> Self:
        """The body with this mask if its mask is None. Models call it with their default mask."""
        is_unset = field_types(type(self)).get("mask") == (Mask | None) and vars(self)["mask"] is None
        change: dict[str, Any] = {"mask": mask} if is_unset else {}
        return replace(self, **change) if change else self

    def without_default_mask(self, mask: Mask) -> Self:
        """The inverse of `with_default_mask`: mask=None if the model would then fill in this mask."""
        if vars(self).get("mask") != mask or field_types(type(self)).get("mask") != (Mask | None):
            return self
        change: dict[str, Any] = {"mask": None}
        unset = replace(self, **change)
        return unset if unset.with_default_mask(mask) == self else self

    def attention_sizes(self, width: int) -> tuple[int, int, int] | None:
        """(heads, kv_heads, head_dim) of its softmax attention; None: it has no such attention."""
        return None

    def build(self, width: int) -> nn.Module:
        raise NotImplementedError

    def memory(self, width: int) -> Memory:
        """The declaration of the arrays that are kept between forwards; None: no state."""
        return None

    def check_width(self, width: int) -> None:
        """Raise SpecError if it cannot be built at this width; by default if the sizes of its state are invalid."""
        self.memory(width)

    def flops(self, width: int, tokens: int, keys: int) -> int:
        """FLOPs of the matrix products of one forward of `tokens` tokens, each of which attends to `keys` keys.

        A multiply-add counts as two. A masked product counts in full, as flop counters count it.
        """
        raise NotImplementedError(f"{type(self).__name__} does not count its FLOPs; define flops() to plan it")

    def inactive_params(self, width: int, tokens: int = 1) -> int:
        """Parameters that none of `tokens` tokens uses: those of experts that no token is routed to.

        For several tokens it is the expected number when all experts are chosen equally often.
        """
        return 0
