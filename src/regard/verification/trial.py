"""A trial: a model, and the inputs on which the laws are tested.

Inputs are drawn from the seed. Their length is limited to what the model can process and cache exactly. Stores are
filled with a constant before use, so that reading a slot that was never written changes the output. `Trial` is for
decoders; other models have subclasses in trials.py, which declare the features that their model lacks.
`randomize_weights` draws the weights if only a spec is given.
"""

import sys
from copy import copy
from functools import partial
from itertools import chain
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from regard.engine.caches import Cache, parse_cache
from regard.engine.stores import STORES
from regard.engine.stores.base import Store
from regard.engine.stores.paged import Paged
from regard.layout import TokenLayout
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.stack import Stack
from regard.parts.state import PerToken, declarations

BLOCK = 4  # tokens per block of the paged store: small, so that every sequence has several blocks
SLACK = 1  # of ring buffers: small, so that sequences wrap around
JUNK = 7.0
MAX_STEP_WORK = 400_000_000  # parameters times tokens decoded one by one: large models decode fewer tokens

Need = Literal["weights", "inputs", "padding", "packing", "memory", "engine"]


class Trial:
    lacks: dict[Need, str] = {}  # features that this kind of model does not have, with the reason
    stores: tuple[str, ...] = tuple(STORES)
    cache = Cache()  # what the stores keep
    source_length = 0  # tokens of the longest source, for a model with cross-attention

    def __init__(self, model: nn.Module, length: int = 24, cuts: tuple[int, ...] | None = None, seed: int = 0):
        self.model: Any = model
        self.spec: Any = model.spec
        self.seed = seed
        self.limit = self.max_length()
        self.length = min(length, self.limit)
        if self.length < 4:
            raise ValueError(f"sequences of {self.length} tokens are too short for the laws; use at least 4")
        default_cuts = {1, self.length // 3, self.length // 2, self.length - 1}
        # cuts: indices at which a sequence is split into two forwards
        self.cuts = tuple(sorted(default_cuts)) if cuts is None else cuts
        # steps: number of tokens that are decoded one by one
        self.steps = max(4, min(48, MAX_STEP_WORK // sum(parameter.numel() for parameter in model.parameters())))
        weight = next(model.parameters())
        self.dtype, self.device = weight.dtype, weight.device

    def max_length(self) -> int:
        """The largest number of tokens that the model can process and cache exactly."""
        return max_length(self.spec)

    def with_store(self, store: str) -> Self:
        """The same trial with one of the stores only."""
        other = copy(self)
        other.stores = (store,)
        return other

    def with_cache(self, cache: str) -> Self:
        """The same trial with a smaller cache. ValueError if the model cannot have it."""
        other = copy(self)
        other.cache = parse_cache(cache)
        other.cache.declare(self.memory())
        return other

    def with_model(self, model: nn.Module) -> Self:
        """The same trial of another model with the same spec."""
        other = copy(self)
        other.model = model
        return other

    def inputs(self, *shape: int, seed: int = 1) -> Tensor:
        return self.random_tokens(self.spec.vocab, shape, seed)

    def random_tokens(self, vocab: int, shape: tuple[int, ...], seed: int) -> Tensor:
        return torch.randint(vocab, shape, generator=self.generator(seed)).to(self.device)

    def generator(self, seed: int) -> torch.Generator:
        return torch.Generator().manual_seed(1000 * self.seed + seed)

    def whole(self, tokens: Tensor, layout: TokenLayout | None = None) -> Tensor:
        """(B, L, V) logits by one forward without a cache."""
        return self.model(tokens, layout)

    def cached_forward(self, tokens: Tensor, layout: TokenLayout, store: Store, span: int | None = None) -> Tensor:
        """(B, L, V) logits of tokens that continue the store's rows."""
        return self.model(tokens, layout, store.begin_forward(layout, span))

    def source_of(self, ids: list[int]) -> list[int] | None:
        """The source ids of a sequence; None for a model without an encoder."""
        return None

    def memory(self) -> tuple:
        return self.spec.memory()

    def has_state(self, kind: type) -> bool:
        """Whether a layer declares a state of this kind (parts/state.py)."""
        return any(isinstance(declared, kind) for memory in chain(*self.memory()) for declared in declarations(memory))

    def windows(self) -> set[tuple[int, int]]:
        """(window, first) of the layers with an attention window; first: number of first tokens that stay visible."""
        tokens = (d for memory in chain(*self.memory()) for d in declarations(memory) if isinstance(d, PerToken))
        return {(declared.window, declared.first) for declared in tokens if declared.window is not None}

    def open_store(self, kind: str, rows: int, length: int = 0, slack: int = SLACK) -> Store:
        """A store with twice the capacity that the rows need, all of it reserved and filled with JUNK."""
        capacity = -(-2 * (length or self.length) // BLOCK) * BLOCK
        open_store = partial(Paged, block=BLOCK) if kind == "paged" else STORES[kind]
        store = open_store(
            self.cache.declare(self.memory()), rows, capacity, self.dtype, self.device, self.source_length, slack
        )
        for row in range(rows):
            assert store.reserve(row, capacity)
        for storage in store.storages:
            for array in storage.arrays.values():
                array.fill_(JUNK)
        return store

    def layout(self, start: int, stop: int, batch: int = 1) -> TokenLayout:
        """Positions start … stop - 1 in every row."""
        return TokenLayout(torch.arange(start, stop, device=self.device).expand(batch, stop - start))

    def padded(
        self, lengths: list[int], width: int, left: bool = False, consecutive: bool = False
    ) -> tuple[TokenLayout, Tensor]:
        """The layout of a padded batch, and which of its tokens are valid (B, L)."""
        layout = layout_with_padding(lengths, width, left)
        assert layout.valid is not None
        valid = layout.valid.to(self.device)
        return TokenLayout(layout.positions.to(self.device), valid=valid, consecutive=consecutive), valid


def layout_with_padding(lengths: list[int], width: int, left: bool = False) -> TokenLayout:
    """Row b has lengths[b] valid tokens, padded on the right, or on the left."""
    slots = torch.arange(width).expand(len(lengths), width)
    sizes = torch.tensor(lengths).unsqueeze(-1)
    positions = slots - (width - sizes) if left else slots
    valid = (positions >= 0) & (positions < sizes)
    return TokenLayout(positions.where(valid, 0), valid=valid)


def max_length(spec: Decoder | Encoder) -> int:
    bodies = (sublayer.body for run in spec.layers for block in run.blocks for sublayer in block.sublayers)
    limits = [getattr(spec, "context", None), *(body.max_exact_cache for body in bodies)]
    return min([n for n in limits if n is not None], default=sys.maxsize)


@torch.no_grad()
def randomize_weights(model: nn.Module, seed: int = 0) -> None:
    """Random weights, large enough that a wrong mask, position or state changes the output.

    With ordinary initialization attention is nearly uniform, norms are one and biases zero. Here scores spread over
    several units, and norms and biases are random around one. A deep stack of such layers amplifies float32 rounding,
    so deeper stacks get weights of a smaller standard deviation.
    """
    depth = sum(len(stack.blocks) for stack in model.modules() if isinstance(stack, Stack))
    spread = 1.5 * (4 / max(4, depth)) ** 0.25
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        value = drawn * spread / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 1 + 0.3 * drawn
        parameter.copy_(value)
