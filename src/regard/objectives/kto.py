"""KTO: train on single completions that are good or bad, without pairs. Ethayarajh et al. 2024.

    r = log π(y | x) - log π_ref(y | x)        z = max(0, mean of r over completions of other prompts)
    loss = λ_good (1 - σ(β (r - z)))  for good completions,        λ_bad (1 - σ(β (z - r)))  for bad ones

z estimates how far the model is from the reference; it has no gradient and is one number for the batch, so a batch
cannot be split for gradient accumulation. Its completions are those of other examples, after the prompts of the batch.

    {"prompt": …, "completion": …, "label": true}
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

from regard.data.batch import Batch
from regard.data.packing import Item
from regard.data.sources.base import Example, Splits, shown
from regard.models.base import Model
from regard.models.decoder import Decoder
from regard.objectives.base import Columns, LossResult, Objective, add_losses, require_keys, require_model
from regard.objectives.chat import tokenize_completion
from regard.objectives.inputs import stack_labels
from regard.objectives.next_token import slice_columns
from regard.objectives.preference_pairs import pack_together
from regard.objectives.sequence_logprobs import sequence_logprobs
from regard.spec import require
from regard.text.messages import tools_of
from regard.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class KTO(Objective):
    scope: ClassVar[Literal["token", "batch"]] = "batch"
    needs_other: ClassVar[bool] = True
    needs_reference = True

    beta: float = 0.1
    good_weight: float = 1.0  # λ of good completions; raise it if they are fewer than a half
    bad_weight: float = 1.0

    def check(self) -> None:
        for name in ("beta", "good_weight", "bad_weight"):
            require(getattr(self, name) > 0, f"{self.kind}: {name}={getattr(self, name)} must be positive")

    def check_model(self, model: Model) -> None:
        require_model(self, model, isinstance(model, Decoder), "a decoder")

    def fit(self, splits: Splits, model: Model) -> Self:
        require_keys(self, splits.train.example(0), "prompt", "completion", "label")
        return self

    def tokenize(self, example: Example, tokenizer: Tokenizer) -> Columns:
        require_keys(self, example, "prompt", "completion", "label")
        columns = tokenize_completion(example["prompt"], example["completion"], tokenizer, tools_of(example))
        return columns | {"label": np.array(is_good(example), np.int64)}

    def sample(self, columns: Columns, tokenizer: Tokenizer, length: int, rng: np.random.Generator) -> list[Item]:
        """The sequence, and `other_ids`: its prompt with the completion of another example."""
        prompt, other = np.argmax(columns["weights"] > 0), np.argmax(columns["other_weights"] > 0)  # their lengths
        if prompt > length:
            return []  # no token of the completion would be left
        other_columns = {
            f"other_{name}": np.concatenate([columns[name][:prompt], columns[f"other_{name}"][other:]])
            for name in ("ids", "weights")
        }
        return [{name: columns[name] for name in ("ids", "weights", "label")} | other_columns]

    def collate(self, rows: Sequence[Sequence[Item]], tokenizer: Tokenizer, length: int) -> Batch:
        """Each row has two segments: 0 the sequence, 1 its prompt with another completion."""
        items = [item for row in rows for item in row]
        others = [{"ids": item["other_ids"], "weights": item["other_weights"]} for item in items]
        pairs = [[slice_columns(part, 0, length) for part in pair] for pair in zip(items, others, strict=True)]
        return Batch(**pack_together(pairs, tokenizer), labels=stack_labels(items))

    def __call__(self, model: nn.Module, batch: Batch) -> LossResult:
        """Needs the fields of a packed batch, `labels` (B,) and `reference` (B, 2)."""
        logprobs, _, losses = sequence_logprobs(model, batch, 2)
        ratios, others = (logprobs - batch.reference.to(logprobs.dtype)).unbind(-1)
        divergence = others.detach().mean().clamp_min(0)
        good = batch.labels > 0
        values = torch.sigmoid(self.beta * torch.where(good, ratios - divergence, divergence - ratios))
        loss = (torch.where(good, self.good_weight, self.bad_weight) * (1 - values)).sum()
        count = torch.ones_like(ratios).sum()
        rewards = self.beta * ratios.detach()
        metrics = {
            "good_reward": mean_over(rewards, good),
            "bad_reward": mean_over(rewards, ~good),
            "divergence": divergence * count,
        }
        return add_losses(loss, count, losses, metrics)


def mean_over(values: Tensor, chosen: Tensor) -> Tensor:
    """The mean over the chosen rows, or 0, multiplied by the number of all rows, because metrics are divided by it."""
    return torch.where(chosen, values, 0).sum() / chosen.sum().clamp_min(1) * len(values)


def is_good(example: Example) -> bool:
    label: Any = example["label"]
    if isinstance(label, bool | np.bool_) or label in (0, 1):
        return bool(label)
    raise ValueError(f"the label {label!r:.40} must be true (good) or false (bad); the example is {shown(example)}")
