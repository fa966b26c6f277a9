"""The interface of an objective, and the functions that several objectives share.

An objective is a spec. It says how an example of the data becomes a row of a batch, and it is a function of a model and
a batch that returns the loss as two sums:

    loss = Σ_t w_t · -log p(target_t)  /  Σ_t w_t

The training step divides once, over the whole step, so the loss does not depend on how a batch is split for
accumulation, how documents are packed into rows, or how rows are distributed over ranks. Metrics are sums too and are
divided by the same count. Padding has weight 0.

Auxiliary losses of the bodies (load balancing of experts) are means over one micro-batch, not sums over tokens. They
are multiplied by the count, so a step averages them over its micro-batches, weighted by their counts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.data.batch import Batch
from regard.data.packing import Item
from regard.data.sources.base import Example, Splits
from regard.layout import TokenLayout
from regard.models.base import Model
from regard.models.encoder import Encoder
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.outputs import LazyLogits, Outputs
from regard.parts.block import Losses
from regard.parts.input import Tokens
from regard.spec import Spec, SpecError
from regard.text.tokenizer import Tokenizer

LossFunction = Callable[[nn.Module, Batch], tuple[Tensor, Tensor, Mapping[str, Tensor]]]
LossResult = tuple[Tensor, Tensor, dict[str, Tensor]]  # loss_sum, count, metrics
Columns = Mapping[str, np.ndarray]  # an example as arrays


class TrainingPhase(NamedTuple):
    """What one step trains: a loss, and the parameters whose names match a pattern; all others are frozen."""

    loss: LossFunction
    trains: str = "*"


@dataclass(frozen=True)
class Objective(Spec):
    """Examples are tokenized once, deterministically, and may be stored. Items are drawn from them in every epoch."""

    kind_table: ClassVar[str] = "objectives"
    needs_other: ClassVar[bool] = False  # `sample` also gets the columns of another example, as `other_NAME`
    scope: ClassVar[Literal["token", "batch"]] = "token"  # batch: the loss compares all rows, so no micro-batches
    alternates: ClassVar[bool] = False  # whether steps train different parameters, as `phase` says

    @property
    def packed(self) -> bool:
        """Whether a row holds several items. Some objectives have a field of this name."""
        return False

    @property
    def needs_reference(self) -> bool:
        """Whether batches have the field `reference` (B, 2): the log-probabilities of both sequences of a row under the
        model before training (objectives/sequence_logprobs.py)."""
        return False

    @property
    def needs_rollouts(self) -> bool:
        """Whether batches hold completions that the model samples during training (objectives/reinforcement.py)."""
        return False

    @property
    def needs_values(self) -> bool:
        """Whether the model needs a value head (models/value_head.py); a decoder without one gets a new one."""
        return False

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The special tokens that a tokenizer needs beyond those of text/train.py; one that is trained gets them."""
        return ()

    def prepare_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raise ValueError if the tokenizer lacks a token that this objective needs; set the token that starts outputs.

        The tokenizer is saved afterwards, so that generation starts with the token that was trained.
        """

    def check_model(self, model: Model) -> None:
        """Raise PairError (see `require_model`) if the objective needs another kind of model, SpecError if it needs
        other settings of this one."""
        raise NotImplementedError

    def fit(self, splits: Splits, model: Model) -> Self:
        """The objective with the settings that depend on the data, such as the names of the labels.

        In `model`, sizes that depend on the data, such as the number of labels, may still be 1.
        """
        return self

    @property
    def head_options(self) -> Mapping[str, Any]:
        """Options of the model's head that depend on the data; used if the recipe has none."""
        return {}

    def model_options(self, tokenizer: Tokenizer) -> Mapping[str, Any]:
        """Options of the model that depend on the tokenizer; used if the recipe has none."""
        return {}

    def tokenize(self, example: Example, tokenizer: Tokenizer) -> Columns:
        """The arrays of an example."""
        raise NotImplementedError

    def sample(self, columns: Columns, tokenizer: Tokenizer, length: int, rng: np.random.Generator) -> list[Item]:
        """The items of an example, each at most `length` tokens long; none if there is nothing to train on."""
        return [columns]

    def collate(self, rows: Sequence[Sequence[Item]], tokenizer: Tokenizer, length: int) -> Batch:
        """A batch of rows of items. Rows have one item each unless the objective is `packed`."""
        raise NotImplementedError

    def phase(self, step: int) -> TrainingPhase:
        """What the step after `step` steps trains."""
        return TrainingPhase(self)

    def __call__(self, model: nn.Module, batch: Batch) -> LossResult:
        raise NotImplementedError


def phase_of(objective: LossFunction, step: int) -> TrainingPhase:
    """The phase of an objective; a plain loss function trains all parameters in every step."""
    return objective.phase(step) if isinstance(objective, Objective) else TrainingPhase(objective)


class PairError(SpecError):
    """An objective and a kind of model that cannot be combined."""


def require_model(objective: Objective, model: Model, fits: bool, needed: str) -> None:
    """Raise PairError unless the model `fits`; `needed` describes the models that do."""
    if not fits:
        raise PairError(f"objective {objective.kind} trains {needed}, and this model is {describe_model(model)}")


def describe_model(model: Model) -> str:
    """The kind of a model, with the input and the head of an encoder: `an encoder of tokens with a masked_lm head`."""
    if isinstance(model, Encoder):
        head = "without a head" if model.head is None else f"with a {model.head.kind} head"
        per_token = ' that has pool="none"' if getattr(model.head, "pool", None) == "none" else ""
        return f"an encoder of {model.input.kind} {head}{per_token}"
    name = f"{'an' if model.kind[0] in 'aeiou' else 'a'} {model.kind}"
    return f"{name} with a source of {model.source.input.kind}" if isinstance(model, EncoderDecoder) else name


def takes_tokens(model: Model) -> bool:
    return isinstance(model, Encoder) and isinstance(model.input, Tokens)


def require_keys(objective: Objective, example: Example, *keys: str) -> None:
    missing = [key for key in keys if key not in example]
    if missing:
        raise ValueError(
            f"objective {objective.kind} needs examples with {', '.join(keys)}; this one has {', '.join(example)}"
        )


def token_loss(
    outputs: Outputs, batch: Batch, label_smoothing: float = 0.0, z_loss: float = 0.0, sparse: bool = False
) -> LossResult:
    """The cross-entropy of every token, and that of the multi-token prediction (`ahead`) blocks.

    The targets of those blocks are further ahead. label_smoothing and z_loss apply to all of them. sparse: few tokens
    have a weight, and only their logits are computed.
    """
    weights = batch.weights.to(torch.promote_types(outputs.logits.dtype, torch.float32))
    count = weights.sum()
    terms = (outputs.logits, batch.targets, weights)
    if sparse and isinstance(outputs.logits, LazyLogits):
        chosen = weights > 0
        terms = (outputs.logits.select(chosen), batch.targets[chosen], weights[chosen])
    loss, correct = cross_entropy(*terms, label_smoothing, z_loss)
    metrics = {"accuracy": correct}
    for i, logits in enumerate(outputs.ahead_logits, start=1):
        ahead, _ = cross_entropy(logits, *shifted(batch, weights, i), label_smoothing, z_loss)
        metrics[f"ahead_{i}"] = ahead.detach()
        loss = loss + ahead
    return add_losses(loss, count, outputs.losses, metrics)


def add_losses(loss: Tensor, count: Tensor, losses: Losses, metrics: dict[str, Tensor]) -> LossResult:
    """Add the auxiliary losses of the bodies to the loss, and to the metrics."""
    sums = {name: mean * count for name, mean in losses.items()}
    return loss + sum(sums.values()), count, metrics | {name: value.detach() for name, value in sums.items()}


def cross_entropy(
    logits: Tensor | LazyLogits, targets: Tensor, weights: Tensor, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Σ w · -log p(target), and Σ w over the tokens whose target has the largest logit; targets and weights (B, L).

    z_loss: the coefficient of Σ w · (log Σ exp logits)², which is added.
    """
    targets = targets.where(weights > 0, 0)  # a target of weight 0 may be any number, even an invalid id
    if isinstance(logits, LazyLogits):
        return logits.cross_entropy(targets, weights, label_smoothing, z_loss)
    wide = logits.flatten(0, 1).to(weights.dtype)  # (B·L, V): a sum over V in half precision would lose the small terms
    losses = F.cross_entropy(wide, targets.flatten(), reduction="none", label_smoothing=label_smoothing)
    if z_loss:
        losses = losses + z_loss * wide.logsumexp(-1).square()
    # Products and sums instead of a dot product, which autocast would compute in half precision.
    loss = (losses * weights.flatten()).sum()
    return loss, ((logits.detach().argmax(-1) == targets) * weights).sum()


def shifted(batch: Batch, weights: Tensor, by: int) -> tuple[Tensor, Tensor]:
    """Targets and weights `by` tokens further ahead; weight 0 where that is outside the token's document."""
    targets, weights = batch.targets.roll(-by, 1), weights.roll(-by, 1)
    same_document = batch.segments == batch.segments.roll(-by, 1)
    same_document[:, -by:] = False
    return targets, weights * same_document


def layout_of(batch: Batch) -> TokenLayout:
    """The layout of a packed batch. If every row is one unpadded document, attention takes its causal fast path."""
    # All positions and segments, because a row may be a part of a longer one, distributed over processes.
    ordered = batch.positions == torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    if (ordered & (batch.segments == batch.segments[:, :1])).all():
        return TokenLayout.whole(*batch.tokens.shape, batch.tokens.device)
    return TokenLayout(batch.positions, batch.segments, valid=batch.segments >= 0, consecutive=True)


def padded_layout(valid: Tensor | None) -> TokenLayout | None:
    """The layout of rows with one sequence each, padded on either side."""
    return None if valid is None else TokenLayout((valid.cumsum(-1) - 1).clamp_min(0), valid=valid, consecutive=True)
