"""The decoder: a language model that reads left to right.

    x = E[tokens] (+ positions)      x = block_n(… block_1(x))      logits = W_head norm(x)

GPT, Llama and the hybrids of attention and recurrence are all this, with different blocks inside.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.at import At
from regard.models.stack import Repeat, Stack, States, memories, unroll
from regard.parts.block import Losses
from regard.parts.norm import Norm, RMSNorm
from regard.parts.position.none import NoPosition, Position
from regard.parts.state import Memory
from regard.spec import Spec, require


@dataclass(frozen=True)
class Decoder(Spec):
    vocab: int
    width: int
    layers: tuple[Repeat, ...]
    position: Position = NoPosition()
    norm: Norm = RMSNorm()
    tied: bool = True
    context: int | None = None  # longest text it was made for; None: what its positions reach, or no limit is known

    def check(self) -> None:
        for name in ("vocab", "width"):
            require(getattr(self, name) > 0, f"decoder: {name}={getattr(self, name)} must be positive")
        require(len(self.layers) > 0, "decoder: layers is empty; give at least one Repeat((block,), times)")
        require(self.context is None or self.context > 0, f"decoder: context={self.context} must be positive")
        self.position.check_place("stack")
        for body in (sublayer.body for run in self.layers for block in run.blocks for sublayer in block.sublayers):
            require(body.causal, f"decoder: a token would see later ones in {body}; choose a causal mask")
        reach = self.position.reach
        if self.context is None:
            object.__setattr__(self, "context", reach)
        elif reach is not None:
            require(
                self.context <= reach, f"decoder: context={self.context} is longer than its positions reach, {reach}"
            )

    @property
    def blocks(self) -> list:
        return unroll(self.layers)

    def memory(self) -> tuple[tuple[Memory, ...], ...]:
        return memories(self.layers, self.width)

    def build(self, seed: int | None = None) -> "DecoderModule":
        """The module with fresh weights, drawn from this seed (the global generator is left alone)."""
        if seed is None:
            return DecoderModule(self)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return DecoderModule(self)


class DecoderModule(nn.Module):
    def __init__(self, spec: Decoder):
        super().__init__()
        self.spec = spec
        self.embedding = nn.Embedding(spec.vocab, spec.width)
        self.position = spec.position.build(spec.width, 1)
        self.stack = Stack(spec.layers, spec.width)
        self.norm = spec.norm.build(spec.width)
        self.head = nn.Linear(spec.width, spec.vocab, bias=False)
        initialize(self, depth=len(self.stack.blocks))
        if spec.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, at: At | None = None, states: States | None = None) -> Tensor:
        """tokens (B, L) -> logits (B, L, V)"""
        return self.head(self.hidden(tokens, at, states))

    def hidden(self, tokens: Tensor, at: At | None = None, states: States | None = None) -> Tensor:
        """tokens (B, L) -> what the head reads (B, L, D)"""
        return self.hidden_with_losses(tokens, at, states)[0]

    def hidden_with_losses(
        self, tokens: Tensor, at: At | None = None, states: States | None = None
    ) -> tuple[Tensor, Losses]:
        """The same, and what bodies add to the loss in training (experts: balance)."""
        at = At.whole(*tokens.shape, tokens.device) if at is None else at
        x = self.position.embed(self.embedding(tokens), at)
        x, losses = self.stack(x, self.position.share(at), states)
        return self.norm(x), losses


def initialize(model: nn.Module, depth: int) -> None:
    """Normal with deviation 1/√columns, and what is added to the residual stream divided by √(2·depth).

    GPT-2 draws all with 0.02, which is 1/√2500: a model 128 wide then starts with flat attention, and learned less in
    the same time (docs/log.md). A fresh model's logits deviate by about 1, so its loss is about ln V + 1/2.
    The taps of a short convolution keep a deviation of 1: each adds as much as its normalized input has.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            residual = name.endswith(("o_proj", "down_proj"))
            nn.init.normal_(module.weight, std=(module.weight.shape[1] * (2 * depth if residual else 1)) ** -0.5)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)
