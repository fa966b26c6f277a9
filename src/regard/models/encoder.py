"""The encoder: a stack in which every token, or patch of an image, may attend to all others.

    x = input(data) (+ positions)      x = block_n(… block_1(x))      out = head(norm(x))

Examples: BERT, vision transformers, sentence embedders, cross-encoders, the encoder of an encoder-decoder.
A body with mask=None gets Full(). Other masks are a symmetric window, Longformer's, BigBird's, or Causal() as in
CLIP's text encoder. Input and positions may be narrower than the stack, with a projection
between them (`embedding_dim`: ELECTRA, Clark et al. 2020).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.kernels.attention.mask import Full
from regard.layout import Source, TokenLayout
from regard.models.base import Model, Scheme, initialize
from regard.models.heads import Classification, Head, Hidden, MaskedLMModule, PreTrainingModule
from regard.models.outputs import Outputs
from regard.models.stack import (
    Repeat,
    Stack,
    States,
    check_shared_bias,
    check_widths,
    resolve_masks,
    unroll,
    without_default_masks,
)
from regard.parts.block import Block, Losses, build_norm, sum_losses
from regard.parts.input import Input
from regard.parts.norm import Norm
from regard.parts.patches import Patches, resize_grid
from regard.parts.position.base import NoPosition, Position
from regard.parts.position.learned import Learned, LearnedModule
from regard.spec import require


@dataclass(frozen=True)
class Encoder(Model["EncoderModule"]):
    input: Input
    width: int
    layers: tuple[Repeat, ...]
    position: Position = NoPosition()
    embedding_norm: Norm | None = None  # after the positions
    norm: Norm | None = None  # after the stack
    head: Head | None = None
    dropout: float = 0.0  # on the embeddings, in training
    embedding_dim: int | None = None  # of input, positions and their norm; None: the width, without projection
    context: int | None = None  # maximum sequence length; None: as many tokens as the positions support

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", resolve_masks(self.layers, Full()))
        super().__post_init__()

    def check(self) -> None:
        for name in ("width", "embedding_dim", "context"):
            value = getattr(self, name)
            require(value is None or value > 0, f"encoder: {name}={value} must be positive")
        require(len(self.layers) > 0, "encoder: layers is empty; add at least one Repeat((block,), times)")
        require(0 <= self.dropout < 1, f"encoder: dropout={self.dropout} must be in [0, 1)")
        self.position.check_place("stack")
        check_shared_bias(self.position, self.layers)
        check_widths(self.layers, self.width)
        if self.head is not None:
            self.head.check_input(self.input, self.table_dim, self.width)
        if isinstance(self.input, Patches) and self.input.any_size:
            require(
                isinstance(self.position, Learned) and self.position.offset == 0,
                f"encoder: any_size=True interpolates learned positions, but position={self.position}; use Learned",
            )
        length, max_positions = self.input.length, self.position.max_positions
        if length is not None and max_positions is not None:
            require(
                length <= max_positions,
                f"encoder: its input has {length} tokens, its positions support only {max_positions}; "
                f"choose at least {length}",
            )
        if self.context is not None and max_positions is not None:
            require(
                self.context <= max_positions,
                f"encoder: context={self.context} exceeds the {max_positions} positions; "
                f"choose at most {max_positions}",
            )

    @property
    def table_dim(self) -> int:
        """Width of the embedding table."""
        return self.embedding_dim or self.width

    @property
    def blocks(self) -> list[Block]:
        return unroll(self.layers)

    def fields_to_write(self) -> dict[str, Any]:
        return super().fields_to_write() | {"layers": without_default_masks(self.layers, Full())}

    def canonical(self, width: int) -> Self:
        return replace(self, context=self.context or self.position.max_positions)

    def module(self, scheme: Scheme) -> "EncoderModule":
        return EncoderModule(self, scheme)


class EncoderModule(nn.Module):
    def __init__(self, spec: Encoder, scheme: Scheme = "fan_in"):
        super().__init__()
        self.spec = spec
        self.input = spec.input.build(spec.table_dim)
        self.position = spec.position.build(spec.table_dim, 1)
        self.embedding_norm = build_norm(spec.embedding_norm, spec.table_dim)
        self.widen = nn.Identity() if spec.embedding_dim is None else nn.Linear(spec.embedding_dim, spec.width)
        self.stack = Stack(spec.layers, spec.width)
        self.norm = build_norm(spec.norm, spec.width)
        self.head = Hidden() if spec.head is None else spec.head.build(spec.width, self.input)
        initialize(self, len(self.stack.blocks), scheme)

    def forward(
        self, data: Tensor, layout: TokenLayout | None = None, types: Tensor | None = None, outputs: bool = False
    ) -> Tensor | tuple[Tensor, Tensor] | Outputs:
        """tokens (B, L) or images (B, C, …) -> the output of the head; with `outputs`, as Outputs with the losses."""
        encoded, losses = self.encode(data, layout, types)
        x, layout, head, pair_logits = encoded.x, self.pooling_layout(encoded.layout, data), self.head, None
        if not outputs:
            return head(x, layout)
        if isinstance(head, PreTrainingModule):
            pair_logits, head = head.pair(x, layout), head.words
        logits = head.lazy(x, layout) if isinstance(head, MaskedLMModule) else head(x, layout)
        return Outputs(logits, (), losses, pair_logits)

    def pooling_layout(self, layout: TokenLayout, tokens: Tensor) -> TokenLayout:
        """The layout for the head: tokens with its id of padding are not pooled."""
        pad = self.spec.head.pad if isinstance(self.spec.head, Classification) else None
        if pad is None:
            return layout
        valid = tokens != pad if layout.valid is None else layout.valid & (tokens != pad)
        return replace(layout, valid=valid, ordered=False, consecutive=False)

    def encode(
        self, data: Tensor, layout: TokenLayout | None = None, types: Tensor | None = None, states: States | None = None
    ) -> tuple[Source, Losses]:
        """The hidden states (B, L, D) with their layout, and the auxiliary losses of the bodies."""
        x, layout = self.embed(data, layout, types)
        x, losses = self.stack(x, self.position.share_bias(layout), states)
        return Source(self.norm(x), layout), losses

    def embed(
        self, data: Tensor, layout: TokenLayout | None = None, types: Tensor | None = None
    ) -> tuple[Tensor, TokenLayout]:
        """The input of the stack (B, L, D) and its layout."""
        x = self.input(data, types)  # (B, L, table_dim)
        layout = TokenLayout.whole(*x.shape[:2], x.device) if layout is None else layout
        x = F.dropout(self.embedding_norm(self.add_positions(x, layout, data)), self.spec.dropout, self.training)
        return self.widen(x), layout  # (B, L, D)

    def add_positions(self, x: Tensor, layout: TokenLayout, data: Tensor) -> Tensor:
        """The embeddings with their positions, which are interpolated if the images have another size."""
        patches = self.spec.input
        if not (isinstance(patches, Patches) and patches.any_size) or data.shape[2:] == patches.image:
            return self.position.embed(x, layout)
        assert isinstance(self.position, LearnedModule), "checked in Encoder"
        grid = patches.grid_of(tuple(data.shape[2:]))
        return x + resize_grid(self.position.table.weight, patches.grid, grid, patches.first)

    def hidden_states_at(self, data: Tensor, depths: Sequence[int]) -> tuple[Tensor, Losses]:
        """Hidden states after the given numbers of blocks, without the final norm, concatenated."""
        x, layout = self.embed(data)
        layout = self.position.share_bias(layout).with_embeddings(x)
        hidden, losses = [x], {}
        for block in self.stack.blocks[: max(depths)]:
            x, block_losses = block(x, layout)
            hidden.append(x)
            losses = sum_losses(losses, block_losses)
        return torch.cat([hidden[depth] for depth in depths], -1), losses  # (B, L, len(depths)·D)
