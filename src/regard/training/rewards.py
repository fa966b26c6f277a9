"""Rewards of completions: numbers, the larger the better.

    exact_match        1 if the completion is the target of the example (data/targets.py), else 0
    json               1 if it is a JSON object; with a target that is one, only if it has the same keys
    module:function    f(prompts, completions, **columns) -> list of numbers, with the other columns of the examples as
                       lists, as in TRL. For prompts that are messages, a completion is a list with one message.
    a run or folder    a reward model: an encoder, or a decoder with a new head, that has one label. It reads as many
                       tokens as its context has, and no stop token after a completion that max_new cut off.

The module is imported from the working directory or the installed packages.
"""

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from regard.data.batch import Batch
from regard.data.packing import pad_items
from regard.data.sources.base import Example
from regard.data.targets import has_target, is_well_formed, read_object, target_of
from regard.models.encoder import Encoder
from regard.objectives.base import Objective
from regard.objectives.inputs import logits_of
from regard.objectives.reinforcement import Reinforcement, prompt_of
from regard.objectives.reward import sequence_ids, without_middle
from regard.text.messages import tools_of
from regard.text.tokenizer import Tokenizer
from regard.training.base_model import check_setting, fingerprint_model, load_model, root_of
from regard.training.run import newest_checkpoint

LARGEST = 1e15  # reward: squares of larger ones have no place in float32
MODEL_ROWS = 32  # completions that a reward model reads at once


class ComputeRewards(Protocol):
    def __call__(
        self, examples: Sequence[Example], completions: Sequence[str], truncated: Sequence[bool] = (), /
    ) -> list[float]:
        """truncated: whether each completion was cut off by max_new; (): none was."""
        ...


def exact_match(examples: Sequence[Example], completions: Sequence[str], truncated: Sequence[bool] = ()) -> list[float]:
    return [float(text.strip() == target_of(example)) for example, text in zip(examples, completions, strict=True)]


def json_object(examples: Sequence[Example], completions: Sequence[str], truncated: Sequence[bool] = ()) -> list[float]:
    targets = [target_of(example) if has_target(example) else "" for example in examples]
    return [
        float(read_object(text) is not None and is_well_formed(text, target) is not False)
        for target, text in zip(targets, completions, strict=True)
    ]


BUILT_IN: dict[str, ComputeRewards] = {"exact_match": exact_match, "json": json_object}


def with_reward_path(objective: Objective) -> Objective:
    """The objective with the folder and the fingerprint of its reward model, if it has one, so that a resumed run has
    the same one."""
    if not isinstance(objective, Reinforcement) or objective.reward in BUILT_IN or not Path(objective.reward).is_dir():
        return objective
    folder = newest_checkpoint(objective.reward).absolute()
    return replace(objective, reward=str(folder), reward_weights=objective.reward_weights or fingerprint_model(folder))


def load_reward(
    name: str, device: torch.device | str = "cpu", setting: str = "objective.reward", weights: str = ""
) -> ComputeRewards:
    """setting: where the name comes from, for errors. weights: the fingerprint that a reward model must have."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    check_setting(f"{setting}={name}", Path(name), weights)
    if Path(name).is_dir():
        return RewardModel(newest_checkpoint(name), device, setting)
    module, _, function = name.partition(":")
    if not module or not function:
        raise ValueError(
            f"{setting}={name!r} is not a reward: use {', '.join(BUILT_IN)}, a function as module:function, or "
            "the folder of a reward model"
        )
    return RewardFunction(name, import_function(f"{setting}={name!r}", module, function))


def import_function(value: str, module: str, function: str) -> Callable[..., Any]:
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # for good: the function may import its neighbours when it is called
    try:
        found = getattr(importlib.import_module(module), function, None)
    except ImportError as error:
        raise ValueError(f"{value}: the module {module} cannot be imported ({error}); start in its folder") from error
    except (Exception, SystemExit) as error:
        raise ValueError(f"{value}: the module {module} failed with {type(error).__name__}: {error}") from error
    if not callable(found):
        raise ValueError(f"{value}: {module} has no function {function}")
    return found


class RewardFunction:
    """A function of the user, whose results are checked."""

    def __init__(self, name: str, function: Callable[..., Any]):
        self.name, self.function = name, function

    def __call__(
        self, examples: Sequence[Example], completions: Sequence[str], truncated: Sequence[bool] = ()
    ) -> list[float]:
        prompts = [prompt_of(example) for example in examples]
        outputs = [
            text if isinstance(prompt, str) else [{"role": "assistant", "content": text.strip()}]
            for prompt, text in zip(prompts, completions, strict=True)
        ]
        names = {name for example in examples for name in example} - {"prompt", "prompts", "completions"}
        columns = {name: [example.get(name) for example in examples] for name in sorted(names)}
        try:
            rewards = self.function(prompts=prompts, completions=outputs, **columns)
            rewards = list(rewards) if isinstance(rewards, Iterator) else rewards
        except (Exception, SystemExit) as error:
            raise ValueError(f"the reward function {self.name} failed: {type(error).__name__}: {error}") from error
        return checked_rewards(rewards, f"the reward function {self.name}", completions)


def checked_rewards(rewards: Any, source: str, completions: Sequence[str]) -> list[float]:
    try:
        if isinstance(rewards, str | bytes | Mapping):
            raise TypeError
        values = [float(reward) for reward in rewards]
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{source} must return a list of numbers, not {rewards!r:.80}") from error
    if len(values) != len(completions):
        raise ValueError(
            f"{source} returned {len(values)} rewards for {len(completions)} completions; return one for each"
        )
    for value, text in zip(values, completions, strict=True):
        if not abs(value) <= LARGEST:
            raise ValueError(f"{source} returned {value} for {text!r:.80}; return a finite number up to {LARGEST:g}")
    return values


class RewardModel:
    """The logit of a model with one label, of the prompt with its completion."""

    def __init__(self, folder: Path, device: torch.device | str = "cpu", setting: str = "objective.reward"):
        self.model: nn.Module = load_model(folder, torch.float32).to(device).eval().requires_grad_(False)
        self.folder, self.tokenizer, self.device = folder, Tokenizer.load(root_of(folder)), device
        spec = self.model.spec
        if not isinstance(spec, Encoder) or getattr(spec.head, "labels", 0) != 1:
            raise ValueError(
                f"{setting}={str(folder)!r} is not a reward model: it needs a classification head with one "
                "label; train one with regard tune reward"
            )
        self.context = spec.context or spec.position.max_positions or sys.maxsize

    @torch.no_grad()
    def __call__(
        self, examples: Sequence[Example], completions: Sequence[str], truncated: Sequence[bool] = ()
    ) -> list[float]:
        truncated = truncated or [False] * len(completions)
        sequences = (
            sequence_ids(prompt_of(example), text, self.tokenizer, cut, tools_of(example))
            for example, text, cut in zip(examples, completions, truncated, strict=True)
        )
        items = [{"ids": without_middle(ids, self.context)} for ids in sequences]  # as in its training
        rewards: list[float] = []
        for first in range(0, len(items), MODEL_ROWS):
            tokens, valid = pad_items(items[first : first + MODEL_ROWS], "ids", self.tokenizer.pad or 0)
            logits, _ = logits_of(self.model, Batch(tokens=tokens, valid=valid).to(self.device))
            rewards += logits[:, 0].tolist()
        return checked_rewards(rewards, f"the reward model {self.folder}", completions)
