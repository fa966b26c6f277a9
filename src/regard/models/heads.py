"""Heads: the outputs of an encoder, computed from its hidden states h.

    MaskedLM         logits = W_E dense(h_t) + b               over the vocabulary, for every token (BERT)
    Classification   logits = W dense(pool(h)) + b             of a sequence or image; of every token without a pool
    PreTraining      both: masked tokens, and whether the second sequence follows the first (BERT)
    Distilled        logits = ½ (W_c h_cls + b_c) + ½ (W_t h_teacher + b_t)      Touvron et al. 2020 (DeiT)
    Pooled           z = W dense(pool(h)), normalized to length one: an embedding of the sequence or image
    Pooler           h, unchanged; its method `pooled` returns dense(h_cls), the pooler_output of BERT

A cross-encoder, which scores a pair of sequences in one forward (Nogueira & Cho 2019), is a Classification with one
label.
"""

from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from regard.layout import TokenLayout
from regard.models.outputs import LazyLogits
from regard.parts.block import build_norm
from regard.parts.feedforward import ACTIVATIONS, Activation, LinearFactory
from regard.parts.input import Input, Tokens, TokensModule
from regard.parts.norm import Norm
from regard.parts.patches import Patches
from regard.parts.pooling import AttentionPooling, Pool, Pooling, pool, pooled_dim
from regard.spec import Spec, require


@dataclass(frozen=True)
class Dense(Spec):
    """norm(σ(W x + b)): a layer between the stack and the projection of a head."""

    activation: Activation = "tanh"
    norm: Norm | None = None
    bias: bool = True

    def build(self, width: int, out: int | None = None, linear: LinearFactory = nn.Linear) -> nn.Module:
        return DenseModule(width, out or width, self, linear)


class DenseModule(nn.Module):
    def __init__(self, width: int, out: int, spec: Dense, linear: LinearFactory):
        super().__init__()
        self.dense = linear(width, out, bias=spec.bias)
        self.norm = build_norm(spec.norm, out)
        self.activation = ACTIVATIONS[spec.activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.activation(self.dense(x)))


@dataclass(frozen=True)
class Head(Spec):
    def check_input(self, input: Input, table_dim: int, width: int) -> None:
        """Raise SpecError if an encoder with this input, embedding width and stack width cannot have this head."""

    def build(self, width: int, input: nn.Module) -> nn.Module:
        """A module of (x, layout); `input` is the encoder's input module, for heads that share its embedding table."""
        raise NotImplementedError


class Hidden(nn.Module):
    """No head: returns the hidden states unchanged."""

    def forward(self, x: Tensor, layout: TokenLayout) -> Tensor:
        return x


@dataclass(frozen=True)
class MaskedLM(Head):
    dense: Dense | None = None  # in BERT: gelu, then a norm; its output has the width of the embeddings
    bias: bool = True
    tied: bool = True

    def check_input(self, input: Input, table_dim: int, width: int) -> None:
        require(
            isinstance(input, Tokens), f"masked_lm: {input.kind} have no vocabulary to predict; use Tokens as input"
        )
        require(
            self.dense is not None or table_dim == width,
            f"masked_lm: the embeddings have {table_dim} channels, the hidden states {width}; set dense=Dense()",
        )

    def build(self, width: int, input: nn.Module) -> nn.Module:
        assert isinstance(input, TokensModule)
        return MaskedLMModule(width, self, input.table)


class MaskedLMModule(nn.Module):
    no_muon = ("vocab",)

    def __init__(self, width: int, spec: MaskedLM, table: nn.Embedding):
        super().__init__()
        table_dim = table.embedding_dim
        self.dense = nn.Identity() if spec.dense is None else spec.dense.build(width, table_dim)
        self.vocab = nn.Linear(table_dim, table.num_embeddings, bias=spec.bias)
        if spec.tied:
            self.vocab.weight = table.weight

    def forward(self, x: Tensor, layout: TokenLayout) -> Tensor:
        return self.vocab(self.dense(x))  # (B, L, V)

    def lazy(self, x: Tensor, layout: TokenLayout) -> Tensor | LazyLogits:
        """For a loss, which needs few of the logits; those of an adapted or quantized layer are computed."""
        if type(self.vocab) is not nn.Linear:
            return self(x, layout)
        return LazyLogits(self.dense(x), self.vocab.weight, self.vocab.bias)


@dataclass(frozen=True)
class Classification(Head):
    labels: int
    pool: Literal["none", "cls", "mean", "last", "cls_mean"] = "cls"  # none: one label per token
    dense: Dense | None = None
    dropout: float = 0.0
    label_names: tuple[str, ...] = ()  # one per label, or none
    bias: bool = True
    pad: int | None = None  # `last` pools the last token with another id, as transformers' decoders do

    def check(self) -> None:
        require(self.labels > 0, f"classification: labels={self.labels} must be positive")
        check_label_names(self.labels, self.label_names)
        require(0 <= self.dropout < 1, f"classification: dropout={self.dropout} must be in [0, 1)")
        require(
            self.pad is None or self.pool == "last",
            f"classification: pad={self.pad} changes which token is pooled, but pool={self.pool!r}; set pool to last",
        )

    def check_input(self, input: Input, table_dim: int, width: int) -> None:
        require(
            self.pad is None or isinstance(input, Tokens),
            f"classification: pad={self.pad} is the id of a token, and {input.kind} have none; leave it out",
        )

    def build(self, width: int, input: nn.Module) -> nn.Module:
        return ClassificationModule(width, self)


class ClassificationModule(nn.Module):
    no_muon = ("labels",)

    def __init__(self, width: int, spec: Classification):
        super().__init__()
        width = width if spec.pool == "none" else pooled_dim(width, spec.pool)
        self.dense = nn.Identity() if spec.dense is None else spec.dense.build(width)
        self.labels = nn.Linear(width, spec.labels, bias=spec.bias)
        self.pool, self.dropout = spec.pool, spec.dropout

    def forward(self, x: Tensor, layout: TokenLayout) -> Tensor:
        x = x if self.pool == "none" else pool(x, layout, self.pool)  # (B, D)
        return self.labels(F.dropout(self.dense(x), self.dropout, self.training))  # (B, labels)


def check_label_names(labels: int, names: tuple[str, ...]) -> None:
    require(len(names) in (0, labels), f"label_names has {len(names)} entries, but labels={labels}; give one per label")


@dataclass(frozen=True)
class PreTraining(Head):
    words: MaskedLM
    pair: Classification

    def check_input(self, input: Input, table_dim: int, width: int) -> None:
        self.words.check_input(input, table_dim, width)

    def build(self, width: int, input: nn.Module) -> nn.Module:
        return PreTrainingModule(width, self, input)


class PreTrainingModule(nn.Module):
    def __init__(self, width: int, spec: PreTraining, input: nn.Module):
        super().__init__()
        self.words, self.pair = spec.words.build(width, input), spec.pair.build(width, input)

    def forward(self, x: Tensor, layout: TokenLayout) -> tuple[Tensor, Tensor]:
        return self.words(x, layout), self.pair(x, layout)  # (B, L, V), (B, labels)


@dataclass(frozen=True)
class Distilled(Head):
    """The mean of two classifiers, trained on labels and on a teacher; the teacher's token is the first register."""

    labels: int
    label_names: tuple[str, ...] = ()  # one per label, or none

    def check(self) -> None:
        require(self.labels > 0, f"distilled: labels={self.labels} must be positive")
        check_label_names(self.labels, self.label_names)

    def check_input(self, input: Input, table_dim: int, width: int) -> None:
        require(
            isinstance(input, Patches) and input.cls and input.registers > 0,
            "distilled: it classifies [CLS] and the teacher's token; use Patches with cls=True and registers=1",
        )

    def build(self, width: int, input: nn.Module) -> nn.Module:
        return DistilledModule(width, self)


class DistilledModule(nn.Module):
    no_muon = ("labels", "teacher")

    def __init__(self, width: int, spec: Distilled):
        super().__init__()
        self.labels, self.teacher = nn.Linear(width, spec.labels), nn.Linear(width, spec.labels)

    def forward(self, x: Tensor, layout: TokenLayout) -> Tensor:
        return (self.labels(x[:, 0]) + self.teacher(x[:, 1])) / 2  # (B, labels)


@dataclass(frozen=True)
class Pooled(Head):
    pool: Pool = "mean"
    dim: int | None = None  # of the embedding; None: the encoder's width, without a projection
    dense: Dense | None = None
    normalize: bool = True
    bias: bool = False  # of the projection
    probe: AttentionPooling | None = None  # attention of a learned query over the tokens, instead of `pool`

    def check(self) -> None:
        require(self.dim is None or self.dim > 0, f"pooled: dim={self.dim} must be positive")

    def pooled_dim(self, width: int) -> int:
        """Channels of the pooled vector."""
        return width if self.probe else pooled_dim(width, self.pool)

    def build(self, width: int, input: nn.Module) -> nn.Module:
        return PooledModule(width, self)


class PooledModule(nn.Module):
    no_muon = ("proj",)

    def __init__(self, width: int, spec: Pooled):
        super().__init__()
        self.pool = Pooling(spec.pool) if spec.probe is None else spec.probe.build(width)
        width = spec.pooled_dim(width)
        self.dense = nn.Identity() if spec.dense is None else spec.dense.build(width)
        self.proj = nn.Identity() if spec.dim is None else nn.Linear(width, spec.dim, bias=spec.bias)
        self.normalize = spec.normalize

    def forward(self, x: Tensor, layout: TokenLayout) -> Tensor:
        z = self.proj(self.dense(self.pool(x, layout)))  # (B, dim)
        return F.normalize(z, dim=-1) if self.normalize else z


@dataclass(frozen=True)
class Pooler(Head):
    """A base model's pooler, whose weights are kept without changing the output of the encoder."""

    dense: Dense = Dense("tanh")

    def build(self, width: int, input: nn.Module) -> nn.Module:
        return PoolerModule(width, self)


class PoolerModule(nn.Module):
    def __init__(self, width: int, spec: Pooler):
        super().__init__()
        self.dense = spec.dense.build(width)

    def forward(self, x: Tensor, layout: TokenLayout) -> Tensor:
        return x

    def pooled(self, x: Tensor, layout: TokenLayout) -> Tensor:
        """(B, L, D) -> (B, D)"""
        return self.dense(pool(x, layout, "cls"))
