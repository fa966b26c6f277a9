"""Heads: what is read from an encoder's vectors.

    MaskedLM         logits = W_E dense(h_t) + b               every token's place in the vocabulary (BERT)
    Classification   logits = W dense(pool(h)) + b             of a text or image; without a pool, of every token
    PreTraining      both: the masked words, and of the pair whether its second text follows the first (BERT)
    Pooled           z = W dense(pool(h)), of length one       a point in a space where near means alike

A cross-encoder, which scores a pair of texts read as one (Nogueira & Cho 2019), is a Classification with one label.
"""

from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from regard.layout import TokenLayout
from regard.parts.block import build
from regard.parts.feedforward import ACTIVATIONS, Activation
from regard.parts.input import Input, Tokens, TokensModule
from regard.parts.norm import Norm
from regard.parts.pooling import AttentionPooling, Pool, Pooling, pool, pooled_dim
from regard.spec import Spec, require


@dataclass(frozen=True)
class Dense(Spec):
    """norm(σ(W x + b)): a layer between the stack and what is read from it."""

    activation: Activation = "tanh"
    norm: Norm | None = None
    bias: bool = True

    def build(self, width: int, out: int | None = None) -> nn.Module:
        return DenseModule(width, out or width, self)


class DenseModule(nn.Module):
    def __init__(self, width: int, out: int, spec: Dense):
        super().__init__()
        self.dense = nn.Linear(width, out, bias=spec.bias)
        self.norm = build(spec.norm, out)
        self.activation = ACTIVATIONS[spec.activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.activation(self.dense(x)))


@dataclass(frozen=True)
class Head(Spec):
    def check_input(self, input: Input, narrow: int, width: int) -> None:
        """Raise SpecError where an encoder that begins so, in vectors this narrow, cannot end so, this wide."""

    def build(self, width: int, input: nn.Module) -> nn.Module:
        """A module of (x, at); `input` is what the encoder begins with, for heads that share its table."""
        raise NotImplementedError


class Hidden(nn.Module):
    """No head: every token's vector as it is."""

    def forward(self, x: Tensor, layout: TokenLayout) -> Tensor:
        return x


@dataclass(frozen=True)
class MaskedLM(Head):
    dense: Dense | None = None  # in BERT: gelu, then a norm; as narrow as the embeddings are
    bias: bool = True
    tied: bool = True

    def check_input(self, input: Input, narrow: int, width: int) -> None:
        require(isinstance(input, Tokens), f"masked_lm: {input.kind} have no vocabulary to guess from; give Tokens")
        require(
            self.dense is not None or narrow == width,
            f"masked_lm: embeddings of {narrow} do not meet vectors of {width}; give it a Dense between them",
        )

    def build(self, width: int, input: nn.Module) -> nn.Module:
        assert isinstance(input, TokensModule)
        return MaskedLMModule(width, self, input.table)


class MaskedLMModule(nn.Module):
    def __init__(self, width: int, spec: MaskedLM, table: nn.Embedding):
        super().__init__()
        narrow = table.embedding_dim
        self.dense = nn.Identity() if spec.dense is None else spec.dense.build(width, narrow)
        self.vocab = nn.Linear(narrow, table.num_embeddings, bias=spec.bias)
        if spec.tied:
            self.vocab.weight = table.weight

    def forward(self, x: Tensor, layout: TokenLayout) -> Tensor:
        return self.vocab(self.dense(x))  # (B, L, V)


@dataclass(frozen=True)
class Classification(Head):
    labels: int
    pool: Literal["none", "cls", "mean", "last", "cls_mean"] = "cls"  # none: a label for every token
    dense: Dense | None = None
    dropout: float = 0.0

    def check(self) -> None:
        require(self.labels > 0, f"classification: labels={self.labels} must be positive")
        require(0 <= self.dropout < 1, f"classification: dropout={self.dropout} must be in [0, 1)")

    def build(self, width: int, input: nn.Module) -> nn.Module:
        return ClassificationModule(width, self)


class ClassificationModule(nn.Module):
    def __init__(self, width: int, spec: Classification):
        super().__init__()
        width = width if spec.pool == "none" else pooled_dim(width, spec.pool)
        self.dense = nn.Identity() if spec.dense is None else spec.dense.build(width)
        self.labels = nn.Linear(width, spec.labels)
        self.pool, self.dropout = spec.pool, spec.dropout

    def forward(self, x: Tensor, layout: TokenLayout) -> Tensor:
        x = x if self.pool == "none" else pool(x, layout, self.pool)  # (B, D)
        return self.labels(F.dropout(self.dense(x), self.dropout, self.training))  # (B, labels)


@dataclass(frozen=True)
class PreTraining(Head):
    words: MaskedLM
    pair: Classification

    def check_input(self, input: Input, narrow: int, width: int) -> None:
        self.words.check_input(input, narrow, width)

    def build(self, width: int, input: nn.Module) -> nn.Module:
        return PreTrainingModule(width, self, input)


class PreTrainingModule(nn.Module):
    def __init__(self, width: int, spec: PreTraining, input: nn.Module):
        super().__init__()
        self.words, self.pair = spec.words.build(width, input), spec.pair.build(width, input)

    def forward(self, x: Tensor, layout: TokenLayout) -> tuple[Tensor, Tensor]:
        return self.words(x, layout), self.pair(x, layout)  # (B, L, V), (B, labels)


@dataclass(frozen=True)
class Pooled(Head):
    pool: Pool = "mean"
    dim: int | None = None  # of the space; None: the encoder's width, and no projection
    dense: Dense | None = None
    normalize: bool = True
    bias: bool = False  # of the projection
    probe: AttentionPooling | None = None  # a learned query, which reads the tokens in the pool's place

    def check(self) -> None:
        require(self.dim is None or self.dim > 0, f"pooled: dim={self.dim} must be positive")

    def pooled(self, width: int) -> int:
        """How wide the one vector of many is."""
        return width if self.probe else pooled_dim(width, self.pool)

    def build(self, width: int, input: nn.Module) -> nn.Module:
        return PooledModule(width, self)


class PooledModule(nn.Module):
    def __init__(self, width: int, spec: Pooled):
        super().__init__()
        self.pool = Pooling(spec.pool) if spec.probe is None else spec.probe.build(width)
        width = spec.pooled(width)
        self.dense = nn.Identity() if spec.dense is None else spec.dense.build(width)
        self.proj = nn.Identity() if spec.dim is None else nn.Linear(width, spec.dim, bias=spec.bias)
        self.normalize = spec.normalize

    def forward(self, x: Tensor, layout: TokenLayout) -> Tensor:
        z = self.proj(self.dense(self.pool(x, layout)))  # (B, dim)
        return F.normalize(z, dim=-1) if self.normalize else z
