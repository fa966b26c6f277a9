"""A trial: a model and the texts that it is tried on.

Texts are drawn from the seed, and are as long as the model can remember exactly. Stores are opened full of a number
that must never be read, so that a hole would be seen. This is a decoder's trial; other models have theirs in
`subjects`, each of which says what its model lacks.
"""

import sys
from copy import copy
from itertools import chain
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from regard.engine.stores.base import Store
from regard.engine.stores.contiguous import Contiguous
from regard.engine.stores.paged import Paged
from regard.layout import TokenLayout
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.parts.state import PerToken, declarations

STORES = ("contiguous", "paged")
BLOCK = 4  # of the paged store: small, so that every text has several
SLACK = 1  # of a window's ring: small, so that texts go round
JUNK = 7.0
STEPS = 400_000_000  # parameters times tokens that are read one at a time: a step of a large model takes long

Need = Literal["weights", "inputs", "padding", "packing", "memory", "engine"]


class Trial:
    lacks: dict[Need, str] = {}  # what laws may need and this kind of model does not have: why
    stores: tuple[str, ...] = STORES
    source = 0  # tokens of the longest source, for a model that reads one

    def __init__(self, model: nn.Module, length: int = 24, cuts: tuple[int, ...] | None = None, seed: int = 0):
        self.model: Any = model
        self.spec: Any = model.spec
        self.seed = seed
        self.limit = self.longest()
        self.length = min(length, self.limit)
        if self.length < 4:
            raise ValueError(f"texts of {self.length} tokens are too short to try a law on; at least 4 are needed")
        several = {1, self.length // 3, self.length // 2, self.length - 1}
        self.cuts = tuple(sorted(several)) if cuts is None else cuts
        self.steps = max(4, min(48, STEPS // sum(parameter.numel() for parameter in model.parameters())))
        weight = next(model.parameters())
        self.dtype, self.device = weight.dtype, weight.device

    def longest(self) -> int:
        """How many tokens the model reads, and remembers exactly."""
        return longest(self.spec)

    def only(self, store: str) -> Self:
        """The same trial with one of the stores."""
        other = copy(self)
        other.stores = (store,)
        return other

    def of(self, model: nn.Module) -> Self:
        """The same trial of another model of this spec."""
        other = copy(self)
        other.model = model
        return other

    def text(self, *shape: int, seed: int = 1) -> Tensor:
        return torch.randint(self.spec.vocab, shape, generator=self.generator(seed)).to(self.device)

    def generator(self, seed: int) -> torch.Generator:
        return torch.Generator().manual_seed(1000 * self.seed + seed)

    def whole(self, tokens: Tensor, layout: TokenLayout | None = None) -> Tensor:
        """(B, L, V) by one forward that remembers nothing."""
        return self.model(tokens, layout)

    def read(self, tokens: Tensor, layout: TokenLayout, store: Store, span: int | None = None) -> Tensor:
        """(B, L, V) logits of tokens that continue the store's rows."""
        return self.model(tokens, layout, store.begin_forward(layout, span))

    def memory(self) -> tuple:
        return self.spec.memory()

    def remembers(self, kind: type) -> bool:
        """Does a layer remember in this way (parts/state.py)?"""
        return any(isinstance(declared, kind) for memory in chain(*self.memory()) for declared in declarations(memory))

    def windows(self) -> set[tuple[int, int]]:
        """(window, first) of the layers whose tokens see no others."""
        tokens = (d for memory in chain(*self.memory()) for d in declarations(memory) if isinstance(d, PerToken))
        return {(declared.window, declared.first) for declared in tokens if declared.window is not None}

    def open(self, kind: str, rows: int, length: int = 0, slack: int = SLACK) -> Store:
        """A store with room for every row, twice as much as it needs, filled with junk."""
        capacity = -(-2 * (length or self.length) // BLOCK) * BLOCK
        place = {"dtype": self.dtype, "device": self.device, "source": self.source, "slack": slack}
        if kind == "contiguous":
            store = Contiguous(self.memory(), rows, capacity, **place)
        else:
            store = Paged(self.memory(), rows, capacity, rows * capacity // BLOCK, block=BLOCK, **place)
        for row in range(rows):
            assert store.reserve(row, capacity)
        for storage in store.storages:
            for array in getattr(storage, "arrays", {}).values():
                array.fill_(JUNK)
        return store

    def span(self, start: int, stop: int, batch: int = 1) -> TokenLayout:
        return TokenLayout(torch.arange(start, stop, device=self.device).expand(batch, stop - start))

    def padded(
        self, lengths: list[int], width: int, left: bool = False, close: bool = False
    ) -> tuple[TokenLayout, Tensor]:
        """Where such a batch stands (`close`: said to stand side by side), and what is valid of it (B, L)."""
        layout = padded(lengths, width, left)
        assert layout.valid is not None
        valid = layout.valid.to(self.device)
        return TokenLayout(layout.positions.to(self.device), valid=valid, consecutive=close), valid


def padded(lengths: list[int], width: int, left: bool = False) -> TokenLayout:
    """Row b holds lengths[b] tokens, flush with the left or (padding on the left) with the right."""
    steps = torch.arange(width).expand(len(lengths), width)
    sizes = torch.tensor(lengths).unsqueeze(-1)
    positions = steps - (width - sizes) if left else steps
    valid = (positions >= 0) & (positions < sizes)
    return TokenLayout(positions.where(valid, 0), valid=valid)


def longest(spec: Decoder | Encoder) -> int:
    bodies = (sublayer.body for run in spec.layers for block in run.blocks for sublayer in block.sublayers)
    limits = [getattr(spec, "context", None), *(body.max_exact_cache for body in bodies)]
    return min([n for n in limits if n is not None], default=sys.maxsize)
