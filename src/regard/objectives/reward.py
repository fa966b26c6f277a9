"""A reward model: a score of a completion, learned from preference pairs. Ouyang et al. 2022.

    loss = -log σ(r(x, y_chosen) - r(x, y_rejected) - m)          m: the `margin` of an example, or 0

The model is an encoder with one output, for example a decoder with the head {"kind": "classification", "labels": 1}.
Only differences of scores matter to this loss; `center` keeps their mean near 0 by adding c (r_chosen + r_rejected)².

People often prefer the longer answer, and then the length alone predicts most labels. With `balance_lengths`, pairs
whose chosen completion is longer count as much in total as those whose chosen completion is not longer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.data.batch import Batch
from regard.data.packing import Item, pad_items
from regard.data.sources.base import Example, Splits, first_epoch, shown
from regard.models.base import Model
from regard.models.encoder import Encoder
from regard.models.heads import Classification
from regard.objectives.base import (
    Columns,
    LossResult,
    Objective,
    add_losses,
    padded_layout,
    require_keys,
    require_model,
    takes_tokens,
)
from regard.objectives.chat import tokenize_completion
from regard.objectives.inputs import encode_pair, stack_labels, wide_logits
from regard.objectives.preference_pairs import SIDES, pair_metrics, require_different, split_prompt
from regard.spec import require
from regard.text.messages import ToolList, tools_of
from regard.text.tokenizer import Tokenizer

COUNTED = 2000  # examples, for the share of pairs whose chosen completion is longer


@dataclass(frozen=True)
class Reward(Objective):
    """Examples have `prompt`, `chosen` and `rejected` as for DPO, and optionally `margin`, a number."""

    center: float = 0.0
    balance_lengths: bool = False
    longer_share: float = 0.0  # of the chosen completions, found in the data if `balance_lengths`

    def check(self) -> None:
        require(self.center >= 0, f"{self.kind}: center={self.center} must not be negative")
        require(0 <= self.longer_share < 1, f"{self.kind}: longer_share={self.longer_share} must be in [0, 1)")

    def check_model(self, model: Model) -> None:
        head = model.head if isinstance(model, Encoder) and takes_tokens(model) else None
        fits = isinstance(head, Classification) and head.pool != "none" and head.labels == 1
        require_model(self, model, fits, "an encoder of tokens with a classification head that pools and has one label")

    @property
    def head_options(self) -> Mapping[str, Any]:
        return {"labels": 1}

    def fit(self, splits: Splits, model: Model) -> Self:
        require_keys(self, splits.train.example(0), *SIDES)
        if not self.balance_lengths or self.longer_share:
            return self
        pairs = [split_prompt(example)[1:] for example in islice(first_epoch(splits.train, COUNTED), COUNTED)]
        share = sum(is_longer(*pair) for pair in pairs) / len(pairs)
        require(
            0 < share < 1,
            f"{splits.train.name}: balance_lengths=true needs pairs of both kinds, and the chosen completion is "
            f"{'always' if share else 'never'} the longer one; set it to false, or add pairs",
        )
        return replace(self, longer_share=share)

    def tokenize(self, example: Example, tokenizer: Tokenizer) -> Columns:
        require_keys(self, example, *SIDES)
        prompt, *completions = split_prompt(example)
        columns = {
            "margin": np.array(margin_of(example), np.float32),
            "longer": np.array(is_longer(*completions), np.int64),
        }
        for side, completion in zip(SIDES, completions, strict=True):
            columns[side] = sequence_ids(prompt, completion, tokenizer, tools=tools_of(example))
        require_different(columns["chosen"], columns["rejected"], example)
        return columns

    def sample(self, columns: Columns, tokenizer: Tokenizer, length: int, rng: np.random.Generator) -> list[Item]:
        """A long sequence loses tokens after its first: the first or the last one is pooled. Nothing of a pair that is
        then the same twice."""
        chosen, rejected = (without_middle(columns[side], length) for side in SIDES)
        return [] if np.array_equal(chosen, rejected) else [{**columns, "chosen": chosen, "rejected": rejected}]

    def collate(self, rows: Sequence[Sequence[Item]], tokenizer: Tokenizer, length: int) -> Batch:
        """tokens and valid (B, 2, L): the chosen and the rejected sequence of each pair; weights and margins (B,)."""
        items = [item for row in rows for item in row]
        sequences = [{"ids": item[side]} for item in items for side in SIDES]
        tokens, valid = (tensor.unflatten(0, (-1, 2)) for tensor in pad_items(sequences, "ids", tokenizer.pad or 0))
        weights = self.weights(stack_labels(items, "longer") > 0)
        return Batch(tokens=tokens, valid=valid, weights=weights, margins=stack_labels(items, "margin"))

    def weights(self, longer: Tensor) -> Tensor:
        """The weight of each pair, 1 on average."""
        if not self.longer_share:
            return torch.ones(longer.shape)
        return torch.where(longer, 0.5 / self.longer_share, 0.5 / (1 - self.longer_share))

    def __call__(self, model: nn.Module, batch: Batch) -> LossResult:
        """Needs tokens and valid (B, 2, L), weights and margins (B,)."""
        outputs = model(batch.tokens.flatten(0, 1), padded_layout(batch.valid.flatten(0, 1)), outputs=True)
        rewards = wide_logits(outputs.logits).view(-1, 2)
        weights, margins = batch.weights.to(rewards.dtype), batch.margins.to(rewards.dtype)
        losses = -F.logsigmoid(rewards[:, 0] - rewards[:, 1] - margins)
        losses = losses + self.center * rewards.sum(-1).square()
        return add_losses((losses * weights).sum(), weights.sum(), outputs.losses, pair_metrics(rewards, weights))


def sequence_ids(
    prompt: Any, completion: Any, tokenizer: Tokenizer, truncated: bool = False, tools: ToolList | None = None
) -> np.ndarray:
    """The prompt with its completion as the policy writes them; two strings as a pair, if there is no eos token.

    truncated: the completion was cut off, so it has no stop token.
    """
    if tokenizer.eos is None and isinstance(prompt, str) and isinstance(completion, str):
        return np.array(encode_pair(tokenizer, prompt, completion).ids, np.int64)
    ids = tokenize_completion(prompt, completion, tokenizer, tools)["ids"]
    return ids[: np.flatnonzero(np.isin(ids, tokenizer.stop_ids))[-1]] if truncated else ids


def is_longer(chosen: Any, rejected: Any) -> bool:
    """Whether the first completion has more characters; of messages, their contents count."""
    return text_length(chosen) > text_length(rejected)


def text_length(completion: Any) -> int:
    if isinstance(completion, str):
        return len(completion)
    return sum(len(str(message.get("content") or "")) for message in completion)


def without_middle(ids: np.ndarray, length: int) -> np.ndarray:
    return ids if len(ids) <= length else np.concatenate([ids[:1], ids[len(ids) - length + 1 :]])


def margin_of(example: Example) -> float:
    margin = 0.0 if example.get("margin") is None else example["margin"]
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not np.isfinite(margin):
        raise ValueError(f"the margin {margin!r:.40} must be a finite number; the example is {shown(example)}")
    return float(margin)
