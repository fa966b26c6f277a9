"""The decoder: an autoregressive language model.

    x = E[tokens] (+ positions)      x = block_n(… block_1(x))      logits = W_head norm(x)

GPT (Radford et al. 2018), Llama and hybrids of attention and recurrence differ in their blocks. `ahead` blocks each
take the stack's output and share its norm and head: the i-th predicts the token i positions after the next (Gloeckle et
al. 2024), for training and speculative decoding. The embedding may be narrower than the stack, with a projection at the
input and one at the output (`embedding_dim`: Lan et al. 2020, OPT-350m).
"""

from dataclasses import dataclass, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from regard.kernels.attention.mask import Causal
from regard.kernels.linear_logprobs import scale_and_cap
from regard.layout import TokenLayout
from regard.models.base import Model, Scheme, initialize
from regard.models.outputs import LazyLogits, Outputs
from regard.models.stack import (
    Repeat,
    Stack,
    States,
    bodies_of,
    check_shared_bias,
    check_widths,
    resolve_masks,
    state_declarations,
    unroll,
    without_default_masks,
)  # fmt: skip
from regard.models.value_head import ValueHead
from regard.parts.block import Block, Losses, build_norm, sum_losses
from regard.parts.input import TOKEN_REMEDY, check_ids, whole_layout
from regard.parts.norm import Norm, RMSNorm
from regard.parts.position.base import NoPosition, Position
from regard.parts.state import Memory, declare_tokens
from regard.spec import require


@dataclass(frozen=True)
class Decoder(Model["DecoderModule"]):
    vocab: int
    width: int
    layers: tuple[Repeat, ...]
    position: Position = NoPosition()
    norm: Norm = RMSNorm()
    tied: bool = True
    context: int | None = None  # maximum sequence length; None: as many tokens as the positions support
    embedding_scale: float = 1.0  # √width in Vaswani et al. 2017 and in Gemma
    embedding_norm: Norm | None = None  # after the positions
    embedding_dim: int | None = None  # of table and head, projected to and from the width; None: the width itself
    head_bias: bool = False
    logit_scale: float = 1.0
    softcap: float | None = None  # of the logits: c · tanh(logits / c)
    ahead: tuple[Block, ...] = ()
    dropout: float = 0.0  # on the embeddings, in training
    value_head: bool = False  # an estimate of the return at every token, for PPO

    def __post_init__(self) -> None:
        for name in ("layers", "ahead"):
            object.__setattr__(self, name, resolve_masks(getattr(self, name), Causal()))
        super().__post_init__()

    def check(self) -> None:
        for name in ("vocab", "width"):
            require(getattr(self, name) > 0, f"decoder: {name}={getattr(self, name)} must be positive")
        require(len(self.layers) > 0, "decoder: layers is empty; add at least one Repeat((block,), times)")
        require(self.context is None or self.context > 0, f"decoder: context={self.context} must be positive")
        require(self.softcap is None or self.softcap > 0, f"decoder: softcap={self.softcap} must be positive")
        require(
            self.embedding_dim is None or self.embedding_dim > 0,
            f"decoder: embedding_dim={self.embedding_dim} must be positive",
        )
        require(0 <= self.dropout < 1, f"decoder: dropout={self.dropout} must be in [0, 1)")
        self.position.check_place("stack")
        check_shared_bias(self.position, self.layers, self.ahead)
        check_widths(self.layers, self.width, self.ahead)
        for body in bodies_of(self.layers, self.ahead):
            require(body.causal, f"decoder: a token would attend to later ones in {body}; choose a causal mask")
        max_positions = self.position.max_positions
        if self.context is None:
            object.__setattr__(self, "context", max_positions)
        elif max_positions is not None:
            require(
                self.context <= max_positions,
                f"decoder: context={self.context} exceeds the {max_positions} positions; "
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
        stacks = {"layers": self.layers, "ahead": self.ahead}
        return super().fields_to_write() | {
            name: without_default_masks(blocks, Causal()) for name, blocks in stacks.items()
        }

    def memory(self) -> tuple[tuple[Memory, ...], ...]:
        memory = state_declarations(self.layers, self.width)
        if not self.position.replaces_bias:
            return memory
        # The scores of all layers depend on the positions of their keys.
        return tuple(tuple(declare_tokens(body, selectable=False) for body in block) for block in memory)

    def module(self, scheme: Scheme) -> "DecoderModule":
        return DecoderModule(self, scheme)


class DecoderModule(nn.Module):
    training_only = ("ahead.", "value_head.")
    no_muon = ("head",)

    def __init__(self, spec: Decoder, scheme: Scheme = "fan_in"):
        super().__init__()
        self.spec = spec
        self.embedding = nn.Embedding(spec.vocab, spec.table_dim)
        self.widen = projection(spec.embedding_dim, spec.width)
        self.embedding_norm = build_norm(spec.embedding_norm, spec.width)
        self.position = spec.position.build(spec.width, 1)
        self.stack = Stack(spec.layers, spec.width)
        self.ahead = nn.ModuleList(block.build(spec.width) for block in spec.ahead)
        self.norm = spec.norm.build(spec.width)
        self.narrow = projection(spec.width, spec.embedding_dim)
        self.head = nn.Linear(spec.table_dim, spec.vocab, bias=spec.head_bias)
        initialize(self, len(self.stack.blocks), scheme)
        if spec.tied:
            self.head.weight = self.embedding.weight
        self.value_head = ValueHead(spec.table_dim) if spec.value_head else nn.Identity()

    def add_value_head(self) -> None:
        """Add a new value head, if there is none."""
        if not self.spec.value_head:
            self.spec = replace(self.spec, value_head=True)
            self.value_head = ValueHead(self.spec.table_dim).to(self.embedding.weight.device)

    def forward(
        self,
        tokens: Tensor,
        layout: TokenLayout | None = None,
        states: States | None = None,
        outputs: bool = False,
        embeddings: Tensor | None = None,
    ) -> Tensor | Outputs:
        """tokens (B, L) -> logits (B, L, V), or all `outputs` that an objective needs.

        `embeddings` (B, L, D) replace those of the tokens, for example where some are patches of an image.
        """
        layout = whole_layout(tokens) if layout is None else layout
        x, losses = self.residual_stream(tokens, layout, states, embeddings)
        if not outputs:
            return self.logits(self.final_norm(x))
        ahead = []
        for block in self.ahead:
            y, block_losses = block(x, self.position.share_bias(layout))
            ahead.append(self.lazy_logits(self.final_norm(y)))
            losses = sum_losses(losses, block_losses)
        hidden = self.final_norm(x)
        values = self.value_head(hidden) if self.spec.value_head else None
        return Outputs(self.lazy_logits(hidden), tuple(ahead), losses, values=values)

    def hidden(
        self,
        tokens: Tensor,
        layout: TokenLayout | None = None,
        states: States | None = None,
        embeddings: Tensor | None = None,
    ) -> Tensor:
        """tokens (B, L) -> the hidden states that the head projects to logits (B, L, D)"""
        layout = whole_layout(tokens) if layout is None else layout
        return self.final_norm(self.residual_stream(tokens, layout, states, embeddings)[0])

    def residual_stream(
        self, tokens: Tensor, layout: TokenLayout, states: States | None = None, embeddings: Tensor | None = None
    ) -> tuple[Tensor, Losses]:
        """tokens (B, L) -> the residual stream after the last block (B, L, D), and the bodies' auxiliary losses"""
        x = self.embed(tokens) if embeddings is None else embeddings
        x = F.dropout(self.embedding_norm(self.position.embed(x, layout)), self.spec.dropout, self.training)
        return self.stack(x, self.position.share_bias(layout), states)

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens (B, L) -> their embeddings (B, L, D), without positions"""
        try:
            x = self.embedding(tokens)
        except IndexError:
            check_ids("token", tokens, self.spec.vocab, TOKEN_REMEDY)  # raises an error that names the id
            raise
        return scale(self.widen(x), self.spec.embedding_scale)

    def final_norm(self, x: Tensor) -> Tensor:
        return self.narrow(self.norm(x))

    def logits(self, hidden: Tensor) -> Tensor:
        logits, spec = self.head(hidden), self.spec
        if spec.logit_scale == 1.0 and spec.softcap is None:
            return logits
        return scale_and_cap(logits, spec.logit_scale, spec.softcap)

    def lazy_logits(self, hidden: Tensor) -> Tensor | LazyLogits:
        """LazyLogits if the head is an nn.Linear; computed logits if it is adapted or quantized."""
        if type(self.head) is not nn.Linear:
            return self.logits(hidden)
        return LazyLogits(hidden, self.head.weight, self.head.bias, self.spec.logit_scale, self.spec.softcap)


def projection(columns: int | None, rows: int | None) -> nn.Module:
    return nn.Identity() if columns is None or rows is None else nn.Linear(columns, rows, bias=False)


def scale(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor
