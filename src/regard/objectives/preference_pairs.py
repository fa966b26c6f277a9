"""Pairs of completions of one prompt, of which one is preferred, as rows of a batch.

    {"prompt": …, "chosen": …, "rejected": …}      strings, or lists of messages
    {"chosen": …, "rejected": …}                   both begin with the prompt: their common start

A row of a batch holds the two sequences of a pair as its segments, 0 the chosen and 1 the rejected one, each with the
prompt; only tokens of the completions count. A sequence that is longer than a row loses its last tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from regard.data.batch import Batch
from regard.data.packing import Item, item_length, pack
from regard.data.sources.base import Example, Splits, shown
from regard.models.base import Model
from regard.models.decoder import Decoder
from regard.objectives.base import Columns, Objective, require_keys, require_model
from regard.objectives.chat import tokenize_completion
from regard.objectives.next_token import slice_columns
from regard.text.messages import tools_of
from regard.text.tokenizer import Tokenizer

SIDES = ("chosen", "rejected")
MULTIPLE = 8  # rows are padded to a length that it divides, so that fewer different lengths occur


@dataclass(frozen=True)
class PreferencePairs(Objective):
    """Objectives on pairs."""

    def check_model(self, model: Model) -> None:
        require_model(self, model, isinstance(model, Decoder), "a decoder")

    def fit(self, splits: Splits, model: Model) -> Self:
        require_keys(self, splits.train.example(0), *SIDES)
        return self

    def tokenize(self, example: Example, tokenizer: Tokenizer) -> Columns:
        require_keys(self, example, *SIDES)
        prompt, *completions = split_prompt(example)
        columns: dict[str, np.ndarray] = {}
        for side, completion in zip(SIDES, completions, strict=True):
            sequence = tokenize_completion(prompt, completion, tokenizer, tools_of(example))
            columns |= {f"{side}_{name}": array for name, array in sequence.items()}
        require_different(columns["chosen_ids"], columns["rejected_ids"], example)
        return columns

    def sample(self, columns: Columns, tokenizer: Tokenizer, length: int, rng: np.random.Generator) -> list[Item]:
        """Nothing of a pair whose sequences, cut to the row, have no completion or are the same."""
        chosen, rejected = (side_of(columns, side, length) for side in SIDES)
        differ = not np.array_equal(chosen["targets"], rejected["targets"])
        return [columns] if differ and chosen["weights"].any() and rejected["weights"].any() else []

    def collate(self, rows: Sequence[Sequence[Item]], tokenizer: Tokenizer, length: int) -> Batch:
        return pack_together([[side_of(item, side, length) for side in SIDES] for (item,) in rows], tokenizer)


def require_different(chosen: np.ndarray, rejected: np.ndarray, example: Example) -> None:
    if np.array_equal(chosen, rejected):
        raise ValueError(f"the chosen and the rejected completion are the same: {shown(example)}; remove this pair")


def side_of(columns: Columns, side: str, length: int) -> Item:
    return slice_columns({"ids": columns[f"{side}_ids"], "weights": columns[f"{side}_weights"]}, 0, length)


def pack_together(rows: Sequence[Sequence[Item]], tokenizer: Tokenizer) -> Batch:
    """A batch of these rows, as short as the longest of them allows."""
    longest = max(sum(map(item_length, items)) for items in rows)
    return pack(rows, -(-longest // MULTIPLE) * MULTIPLE, tokenizer.pad or 0)


def split_prompt(example: Example) -> tuple[Any, Any, Any]:
    """Prompt, chosen and rejected completion. Without a prompt it is the common start of the other two: whole messages,
    or the characters before the space where they first differ. A string is the user's message if messages follow."""
    chosen, rejected = (example[side] for side in SIDES)
    if (prompt := example.get("prompt")) is not None:
        if isinstance(prompt, str) and isinstance(chosen, list) and isinstance(rejected, list):
            prompt = [{"role": "user", "content": prompt}]
        return prompt, without_prompt(prompt, chosen), without_prompt(prompt, rejected)
    if type(chosen) is not type(rejected) or not isinstance(chosen, str | list | tuple):
        raise ValueError(f"`chosen` and `rejected` must both be strings or both lists of messages: {shown(example)}")
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False)))
    if isinstance(chosen, str) and shared and chosen[shared - 1] == " ":
        shared -= 1
    if not shared:
        raise ValueError(f"`chosen` and `rejected` have no common start, and there is no `prompt`: {shown(example)}")
    return chosen[:shared], chosen[shared:], rejected[shared:]


def without_prompt(prompt: Any, completion: Any) -> Any:
    """A completion that is a conversation may begin with the messages of the prompt."""
    if isinstance(prompt, list) and isinstance(completion, list) and completion[: len(prompt)] == prompt:
        return completion[len(prompt) :]
    return completion


def pair_metrics(rewards: Tensor, weights: Tensor | None = None) -> dict[str, Tensor]:
    """Sums over the pairs. rewards: (B, 2) of the chosen and the rejected sequences; weights: (B,) of the pairs."""
    chosen, rejected = rewards.detach().unbind(-1)
    weights = torch.ones_like(chosen) if weights is None else weights
    values = {
        "accuracy": (chosen > rejected) + 0.5 * (chosen == rejected),
        "margin": chosen - rejected,
        "chosen_reward": chosen,
        "rejected_reward": rejected,
    }
    return {name: (value * weights).sum() for name, value in values.items()}


def pair_count(rewards: Tensor) -> Tensor:
    return torch.ones_like(rewards[:, 0]).sum()
