"""Reinforcement learning: the model samples completions of prompts during training, and a reward rates them.

    {"prompt": …, "answer": …}      a string or a list of messages, and any columns that the reward needs
    {"messages": […]}               the prompt are the messages before the last answer of the assistant

The batches come from rollouts (training/rollouts.py). Beside the fields of a packed batch they have, per token (B, L),

    advantages             how much better than expected the completion is; without a value head the same for all tokens
    old_logprobs           log π_old(token): of the model that sampled, computed by the forward of training
    reference_logprobs     of the model before training, if `kl` is not 0
    old_values, returns    of a value head: its estimates when the model sampled, and what it learns to predict

and `rollout` (B, …), measurements of the whole rollout, which every step reports. Losses divide by the number of
sampled tokens T. Objectives that divide by the number n or by the lengths of sequences have other weights instead: with
T / (n · length) for the tokens of a sequence, Σ weight · loss / T is the mean over sequences of means over tokens.

A batch without advantages is one of an evaluation. It has only `rewards` (B,) and `lengths` (B,), and its loss is the
mean reward with a minus sign.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn

from regard.data.batch import Batch
from regard.data.packing import Item
from regard.data.sources.base import Example, Splits, shown
from regard.models.base import Model
from regard.models.decoder import Decoder
from regard.objectives.base import Columns, LossResult, Objective, add_losses, require_model
from regard.objectives.chat import prompt_ids
from regard.objectives.next_token import slice_columns
from regard.objectives.preference_pairs import pack_together
from regard.objectives.sequence_logprobs import TokenScores, score_tokens
from regard.spec import require
from regard.text.messages import checked_messages, tools_of
from regard.text.tokenizer import Tokenizer

# of a rollout: mean and standard deviation of its rewards, the share of prompts whose completions all have the same
# reward, the mean length of completions, the share that max_new cut off, and mean and largest |log p of the engine -
# log p of the trainer| of the sampled tokens
ROLLOUT_METRICS = (
    "reward", "reward_std", "equal_rewards", "completion_length", "truncated", "engine_gap", "largest_engine_gap",
)  # fmt: skip


@dataclass(frozen=True)
class Reinforcement(Objective):
    """`data.rows` completions are the batch of one step, and a rollout has those of `updates` steps."""

    kl_in_reward: ClassVar[bool] = False  # the divergence from the reference lowers the reward, not the loss
    rollout_metrics: ClassVar[tuple[str, ...]] = ROLLOUT_METRICS  # the names of `rollout`
    needs_rollouts = True

    reward: str = "exact_match"  # or "json", "module:function", or a reward model: a run or a folder
    reward_weights: str = ""  # the fingerprint of a reward model, found at the start of a run
    group: int = 8  # completions per prompt
    max_new: int = 64  # tokens per completion
    temperature: float = 1.0  # of sampling, and of the distribution that is trained
    kl: float = 0.0  # coefficient of the divergence from the model before training
    epochs: int = 1  # passes over a rollout
    updates: int = 1  # steps per pass
    max_kl: float = 1.0  # nats per token, above which training stops; only with `kl`, for which it is measured
    min_entropy: float = 1e-4  # nats per token, below which training stops

    def check(self) -> None:
        for name in ("group", "max_new", "epochs", "updates"):
            require(getattr(self, name) >= 1, f"{self.kind}: {name}={getattr(self, name)} must be at least 1")
        for name in ("temperature", "max_kl"):
            require(getattr(self, name) > 0, f"{self.kind}: {name}={getattr(self, name)} must be positive")
        for name in ("kl", "min_entropy"):
            require(getattr(self, name) >= 0, f"{self.kind}: {name}={getattr(self, name)} must not be negative")
        require(
            self.kl > 0 or self.max_kl == Reinforcement.max_kl,
            f"{self.kind}: max_kl={self.max_kl} has no effect: the divergence is measured only if kl is not 0; set kl, "
            "for example to 0.001, or omit max_kl",
        )

    def check_model(self, model: Model) -> None:
        require_model(self, model, isinstance(model, Decoder), "a decoder")

    def fit(self, splits: Splits, model: Model) -> Self:
        prompt_of(splits.train.example(0))
        return self

    def tokenize(self, example: Example, tokenizer: Tokenizer) -> Columns:
        """`ids` of the prompt."""
        return {"ids": np.array(prompt_ids(prompt_of(example), tokenizer, tools_of(example)), np.int64)}

    def sample(self, columns: Columns, tokenizer: Tokenizer, length: int, rng: np.random.Generator) -> list[Item]:
        return [columns] if 0 < len(columns["ids"]) <= length - self.max_new else []  # too long for a row

    def collate(self, rows: Sequence[Sequence[Item]], tokenizer: Tokenizer, length: int) -> Batch:
        """The prompts alone, for display: none of their tokens counts."""
        return sampled_batch([(item["ids"].tolist(), []) for (item,) in rows], tokenizer)

    def advantages(self, rewards: Tensor) -> Tensor:
        """Rewards (prompts, group) -> advantages (prompts, group)."""
        raise NotImplementedError

    def token_fields(self, batches: Sequence[Batch], rewards: Tensor, kl: float) -> list[dict[str, Tensor]]:
        """The fields of every batch that depend on the rewards (n,) of all completions, such as `advantages`.

        kl: the coefficient of this rollout.
        """
        if kl and self.kl_in_reward:
            differences = [(batch.old_logprobs - batch.reference_logprobs).double().sum(1) for batch in batches]
            rewards = rewards - kl * torch.cat(differences)
        advantages = self.advantages(rewards.view(-1, self.group)).flatten().split([batch.size for batch in batches])
        return [
            {"advantages": (batch.weights > 0) * values.float().unsqueeze(1)}
            for batch, values in zip(batches, advantages, strict=True)
        ]

    def measure(self, batches: Sequence[Batch], kl: float) -> list[float]:
        """The further `rollout_metrics` of a rollout, whose batches have their token fields."""
        return []

    def next_kl(self, batches: Sequence[Batch], kl: float) -> float:
        """The coefficient of the divergence for the rollout after this one, which had `kl`."""
        return kl

    def sequence_weights(self, lengths: Tensor) -> Tensor:
        """The numbers of sampled tokens of all sequences of a batch (n,) -> the weight of a token of each (n,)."""
        raise NotImplementedError

    def token_losses(self, scores: TokenScores, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of every token (B, L), and metrics as sums over the tokens that count."""
        raise NotImplementedError

    def __call__(self, model: nn.Module, batch: Batch) -> LossResult:
        if "advantages" not in batch:
            count = torch.ones_like(batch.rewards).sum()
            return -batch.rewards.sum(), count, {"reward": batch.rewards.sum(), "length": batch.lengths.sum()}
        scores, losses = score_tokens(model, batch, self.temperature)
        token_losses, metrics = self.token_losses(scores, batch)
        dtype = scores.logprobs.dtype
        loss = (batch.weights.to(dtype) * token_losses).sum()
        count = (batch.weights > 0).to(dtype).sum()
        rollout = batch.rollout.to(dtype).mean(0) * count  # the same in all rows
        metrics |= {"entropy": scores.entropies.sum(), **dict(zip(self.rollout_metrics, rollout, strict=True))}
        return add_losses(loss, count, losses, metrics)


def prompt_of(example: Example) -> Any:
    """The prompt, a string or a list of messages."""
    if example.get("prompt") is not None:
        return example["prompt"]
    if "messages" not in example:
        raise ValueError(
            f"sampling needs examples with `prompt` or `messages`; this one has {', '.join(example)}; "
            'rename a field, for example by data.columns=["prompt=question"]'
        )
    messages = checked_messages(example["messages"])
    answered = messages[-1]["role"] == "assistant"
    if answered and len(messages) == 1:
        raise ValueError(f"this conversation has no message before the answer: {shown(example)}; add a prompt")
    return messages[:-1] if answered else messages


def sampled_batch(sequences: Sequence[tuple[Sequence[int], Sequence[int]]], tokenizer: Tokenizer) -> Batch:
    """A row for every sequence, a prompt and its completion; the tokens of completions have weight 1."""
    rows = []
    for prompt, completion in sequences:
        weights = np.repeat(np.array([0, 1], np.float32), [len(prompt), len(completion)])
        columns = {"ids": np.array([*prompt, *completion], np.int64), "weights": weights}
        rows.append([slice_columns(columns, 0, len(weights))])
    return pack_together(rows, tokenizer)
