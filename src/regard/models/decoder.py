"""The decoder: a language model that reads left to right.

    x = E[tokens] (+ positions)      x = block_n(… block_1(x))      logits = W_head norm(x)

GPT, Llama and the hybrids of attention and recurrence are all this, with different blocks inside. `ahead` blocks stand
side by side on top of the stack, each with the same norm and head: the i-th guesses the token i further than the next
(Gloeckle et al. 2024). They serve training and speculation; logits are the next token's. Words may be narrower than the
stack, with a matrix on the way in and one on the way out (`embedding_dim`: Lan et al. 2020, OPT-350m).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from regard.at import At
from regard.models.initialize import Scheme, initialize
from regard.models.model import Model
from regard.models.stack import Repeat, Stack, States, check_shared_bias, memories, unroll
from regard.models.unembedded import Unembedded, finished
from regard.parts.block import Block, Losses, add, build
from regard.parts.norm import Norm, RMSNorm
from regard.parts.position.none import NoPosition, Position
from regard.parts.state import Memory
from regard.spec import require


@dataclass(frozen=True)
class Decoder(Model["DecoderModule"]):
    vocab: int
    width: int
    layers: tuple[Repeat, ...]
    position: Position = NoPosition()
    norm: Norm = RMSNorm()
    tied: bool = True
    context: int | None = None  # longest text it was made for; None: what its positions reach, or no limit is known
    embedding_scale: float = 1.0  # √width in Vaswani et al. 2017 and in Gemma
    embedding_norm: Norm | None = None  # behind the positions
    embedding_dim: int | None = None  # of the table and the head, with a matrix between; None: the width (no matrix)
    head_bias: bool = False
    logit_scale: float = 1.0
    softcap: float | None = None  # of the logits: c · tanh(logits / c)
    ahead: tuple[Block, ...] = ()
    dropout: float = 0.0  # on the embeddings, in training

    def check(self) -> None:
        for name in ("vocab", "width"):
            require(getattr(self, name) > 0, f"decoder: {name}={getattr(self, name)} must be positive")
        require(len(self.layers) > 0, "decoder: layers is empty; give at least one Repeat((block,), times)")
        require(self.context is None or self.context > 0, f"decoder: context={self.context} must be positive")
        require(self.softcap is None or self.softcap > 0, f"decoder: softcap={self.softcap} must be positive")
        require(
            self.embedding_dim is None or self.embedding_dim > 0,
            f"decoder: embedding_dim={self.embedding_dim} must be positive",
        )
        require(0 <= self.dropout < 1, f"decoder: dropout={self.dropout} must be in [0, 1)")
        self.position.check_place("stack")
        check_shared_bias(self.position, self.layers, self.ahead)
        blocks = [block for run in self.layers for block in run.blocks]  # each once: a run may be of any length
        for body in (sublayer.body for block in (*blocks, *self.ahead) for sublayer in block.sublayers):
            require(body.causal, f"decoder: a token would see later ones in {body}; choose a causal mask")
        reach = self.position.reach
        if self.context is None:
            object.__setattr__(self, "context", reach)
        elif reach is not None:
            require(
                self.context <= reach, f"decoder: context={self.context} is longer than its positions reach, {reach}"
            )

    @property
    def table_dim(self) -> int:
        """How wide a word's row of the embedding is."""
        return self.embedding_dim or self.width

    @property
    def blocks(self) -> list[Block]:
        return unroll(self.layers)

    def memory(self) -> tuple[tuple[Memory, ...], ...]:
        return memories(self.layers, self.width)

    def module(self, scheme: Scheme) -> "DecoderModule":
        return DecoderModule(self, scheme)


class Outputs(NamedTuple):
    said: Tensor | Unembedded  # logits (B, L, V), or what they are made of
    further: tuple[Tensor | Unembedded, ...]  # the same of the heads that look ahead
    losses: Losses  # of the bodies, in training

    @property
    def logits(self) -> Tensor:
        return made(self.said)

    @property
    def ahead(self) -> tuple[Tensor, ...]:
        return tuple(map(made, self.further))


def made(said: Tensor | Unembedded) -> Tensor:
    return said.logits() if isinstance(said, Unembedded) else said


class DecoderModule(nn.Module):
    def __init__(self, spec: Decoder, scheme: Scheme = "fan_in"):
        super().__init__()
        self.spec = spec
        self.embedding = nn.Embedding(spec.vocab, spec.table_dim)
        self.widen = projection(spec.embedding_dim, spec.width)
        self.embedding_norm = build(spec.embedding_norm, spec.width)
        self.position = spec.position.build(spec.width, 1)
        self.stack = Stack(spec.layers, spec.width)
        self.ahead = nn.ModuleList(block.build(spec.width) for block in spec.ahead)
        self.norm = spec.norm.build(spec.width)
        self.narrow = projection(spec.width, spec.embedding_dim)
        self.head = nn.Linear(spec.table_dim, spec.vocab, bias=spec.head_bias)
        initialize(self, len(self.stack.blocks), scheme)
        if spec.tied:
            self.head.weight = self.embedding.weight

    def forward(
        self, tokens: Tensor, at: At | None = None, states: States | None = None, outputs: bool = False
    ) -> Tensor | Outputs:
        """tokens (B, L) -> logits (B, L, V), or all `outputs` that training wants."""
        at = At.whole(*tokens.shape, tokens.device) if at is None else at
        x, losses = self.run(self.embed(tokens, at), at, states)
        return self.outputs(x, at, losses) if outputs else self.logits(self.top(x))

    def outputs(self, x: Tensor, at: At, losses: Losses) -> Outputs:
        """All that training wants, from the top of the stack (B, L, D)."""
        further = []
        for block in self.ahead:
            y, more = block(x, self.position.share(at))
            further.append(self.unembed(self.top(y)))
            losses = add(losses, more)
        return Outputs(self.unembed(self.top(x)), tuple(further), losses)

    def hidden(self, tokens: Tensor, at: At | None = None, states: States | None = None) -> Tensor:
        """tokens (B, L) -> what the head reads (B, L, D)"""
        at = At.whole(*tokens.shape, tokens.device) if at is None else at
        return self.top(self.run(self.embed(tokens, at), at, states)[0])

    def top(self, x: Tensor) -> Tensor:
        """The top of the stack -> what the head reads"""
        return self.narrow(self.norm(x))

    def embed(self, tokens: Tensor, at: At) -> Tensor:
        """tokens (B, L) -> the foot of the stack (B, L, D)"""
        return self.enter(scaled(self.widen(self.embedding(tokens)), self.spec.embedding_scale), at)

    def enter(self, x: Tensor, at: At) -> Tensor:
        """Vectors of tokens, or of anything that stands among them -> the foot of the stack (B, L, D)"""
        return F.dropout(self.embedding_norm(self.position.embed(x, at)), self.spec.dropout, self.training)

    def run(self, x: Tensor, at: At, states: States | None = None) -> tuple[Tensor, Losses]:
        """The foot of the stack -> its top, and what bodies add to the loss in training (experts: balance)."""
        return self.stack(x, self.position.share(at), states)

    def logits(self, hidden: Tensor) -> Tensor:
        return finished(self.head(hidden), self.spec.logit_scale, self.spec.softcap)

    def unembed(self, hidden: Tensor) -> Tensor | Unembedded:
        """What a loss reads; the logits themselves where the head is more than a matrix (an adapter, packed numbers)"""
        if type(self.head) is not nn.Linear:
            return self.logits(hidden)
        return Unembedded(hidden, self.head.weight, self.head.bias, self.spec.logit_scale, self.spec.softcap)


def projection(columns: int | None, rows: int | None) -> nn.Module:
    return nn.Identity() if columns is None or rows is None else nn.Linear(columns, rows, bias=False)


def scaled(x: Tensor, by: float) -> Tensor:
    return x if by == 1.0 else x * by
