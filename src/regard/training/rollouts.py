"""Rollouts: the batches of reinforcement learning, sampled from the model that is trained.

    prompts -> the engine samples `group` completions each -> rewards -> log-probabilities by the forward of training
    -> advantages -> epochs × updates batches (objectives/reinforcement.py)

The old log-probabilities are computed in the same micro-batches as those of training, so without dropout the ratios of
the first step are exactly 1. Those of the engine are compared with them in every rollout (`engine_gap`): if they differ
by more than rounding, the samples belong to another distribution than the one that is trained.

The seed of a sample depends on the run's seed and on the number of the sample. The state holds the position in the
prompts and, inside a rollout, the rollout, so a run that is stopped after any step resumes bit-identically.
"""

import base64
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from regard.data.batch import Batch
from regard.data.loader import most_empty
from regard.data.sources.base import Example, Examples
from regard.objectives.chat import prompt_ids
from regard.objectives.reinforcement import Reinforcement, prompt_of, sampled_batch
from regard.objectives.sequence_logprobs import TokenScores, score_tokens
from regard.text.messages import tools_of
from regard.text.tokenizer import Tokenizer
from regard.training.rewards import ComputeRewards
from regard.training.step import Precision

STOPS_AGAIN = "a resumed run samples the same rollout and stops again; a new one may start from it (--from RUN)"
LARGE_GAP = 1e-2  # nats, between the log-probabilities of engine and trainer in float32


class SampledCompletion(NamedTuple):
    ids: list[int]  # with the stop token
    logprobs: list[float]  # of the model's distribution at temperature 1
    text: str
    truncated: bool  # by max_new


# prompts, a seed each, temperature -> a completion each
Generate = Callable[[Sequence[Sequence[int]], Sequence[int], float], list[SampledCompletion]]
TokenizedPrompt = tuple[Example, list[int]]


class Scorer(NamedTuple):
    """Scores of sampled tokens, in eval mode, without gradients, in micro-batches of equal size."""

    model: nn.Module
    precision: Precision = nullcontext
    micro_batches: int = 1

    @torch.no_grad()
    def __call__(self, batch: Batch, temperature: float) -> TokenScores:
        """On the CPU."""
        device, mode = next(self.model.parameters()).device, self.model.training
        size = batch.size // self.micro_batches
        self.model.eval()
        try:
            with self.precision():
                parts = [
                    score_tokens(self.model, batch.rows(slice(first, first + size)).to(device), temperature)[0]
                    for first in range(0, batch.size, size)
                ]
        finally:
            self.model.train(mode)
        columns = ([part for part in column if part is not None] for column in zip(*parts, strict=True))
        return TokenScores(*(torch.cat(column).cpu() for column in columns if column))


class Prompts:
    """The prompts of examples that leave space for `max_new` more tokens in a row of `length` tokens.

    note: is told once how many others are left out.
    """

    def __init__(
        self,
        examples: Examples,
        tokenizer: Tokenizer,
        length: int,
        max_new: int,
        note: Callable[[str], None] = lambda text: None,
    ):
        self.examples, self.tokenizer, self.length, self.max_new = examples, tokenizer, length, max_new
        self.note, self._noted = note, False

    def read(self, index: int) -> TokenizedPrompt | None:
        """An example and the tokens of its prompt; None if it is left out."""
        example = self.examples.example(index)
        try:
            ids = prompt_ids(prompt_of(example), self.tokenizer, tools_of(example))
        except ValueError as error:
            raise ValueError(f"example {index} of {self.examples.name}: {error}") from error
        return (example, ids) if 0 < len(ids) <= self.length - self.max_new else None

    def find(self, first: int, count: int) -> tuple[list[TokenizedPrompt], int]:
        """The first `count` prompts from an index on, and the index after them."""
        found: list[TokenizedPrompt] = []
        index = last = first
        while len(found) < count:
            prompt, index = self.read(index), index + 1
            if prompt is not None:
                found.append(prompt)
                last = index
            elif index - last == most_empty(self.examples):
                raise ValueError(
                    f"{self.examples.name}: {index - last} prompts in a row are longer than data.length={self.length}"
                    f" - objective.max_new={self.max_new}, or have no tokens; raise data.length"
                )
        self.report(index - first - count, index - first)
        return found, index

    def report(self, skipped: int, read: int) -> None:
        if skipped and not self._noted:
            self._noted = True
            end = "" if skipped < read else ", so there is no evaluation"
            self.note(
                f"{self.examples.name}: {skipped} of {read} prompts have no tokens, or more than data.length="
                f"{self.length} - objective.max_new={self.max_new}; they are left out{end}"
            )


class RolloutLoader:
    """An endless iterator of batches of `rows` completions.

    length: the largest number of tokens of a prompt with its completion; longer prompts are left out. reference: the
    log-probabilities under the model before training, needed if the objective has a `kl`. note: is told warnings.
    """

    def __init__(
        self,
        examples: Examples,
        objective: Reinforcement,
        tokenizer: Tokenizer,
        rows: int,
        length: int,
        generate: Generate,
        reward: ComputeRewards,
        scorer: Scorer,
        reference: Callable[[Batch, float], TokenScores] | None = None,
        seed: int = 0,
        note: Callable[[str], None] = lambda text: None,
    ):
        if rows * objective.updates % objective.group:
            raise ValueError(
                f"data.rows={rows} with objective.updates={objective.updates} gives rollouts of "
                f"{rows * objective.updates} completions, which objective.group={objective.group} does not divide; use "
                "a multiple"
            )
        if objective.kl and reference is None:
            raise ValueError(f"objective.kl={objective.kl} needs the log-probabilities of a reference")
        self.prompts = Prompts(examples, tokenizer, length, objective.max_new, note)
        self.examples, self.objective, self.tokenizer, self.rows = examples, objective, tokenizer, rows
        self.generate, self.reward, self.scorer = generate, reward, scorer
        self.reference, self.seed, self.note = reference, seed, note
        self._next_example = self._samples = self._done = 0
        self._kl = objective.kl  # an objective may adapt it after every rollout
        self._batches: list[Batch] = []  # of the rollout, if some of its steps are left
        self._encoded: list[dict[str, Any]] = []
        self._warned = self._noted_equal = False

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if not self._batches:
            self._batches, self._done = self.roll_out(), 0
        batch = self._batches[self._done % self.objective.updates]
        self._done += 1
        if self._done == self.objective.epochs * self.objective.updates:
            self._batches, self._encoded, self._done = [], [], 0
        elif not self._encoded:
            self._encoded = [encode_batch(batch) for batch in self._batches]
        return batch

    def roll_out(self) -> list[Batch]:
        """The batches of a new rollout."""
        objective, group = self.objective, self.objective.group
        chosen, index = self.prompts.find(self._next_example, self.rows * objective.updates // group)
        prompts = [prompt for prompt in chosen for _ in range(group)]
        seeds = [sample_seed(self.seed, self._samples + n) for n in range(len(prompts))]
        completions = self.generate([ids for _, ids in prompts], seeds, objective.temperature)
        rewards = torch.tensor(self.rate([example for example, _ in prompts], completions), dtype=torch.float64)
        sequences = [(ids, c.ids) for (_, ids), c in zip(prompts, completions, strict=True)]
        batches = [
            self.score(sampled_batch(sequences[start : start + self.rows], self.tokenizer))
            for start in range(0, len(sequences), self.rows)
        ]
        self.check_guards(batches)
        measured = self.measure(batches, rewards, completions)
        self._next_example, self._samples = index, self._samples + len(prompts)  # after all that may raise an error
        return self.finish(batches, rewards, measured)

    def rate(self, examples: Sequence[Example], completions: Sequence[SampledCompletion]) -> list[float]:
        return self.reward(examples, [c.text for c in completions], [c.truncated for c in completions])

    def score(self, batch: Batch) -> Batch:
        """The batch with log-probabilities and values, and with entropies for the guards."""
        temperature = self.objective.temperature
        scores = self.scorer(batch, temperature)
        fields = {"old_logprobs": scores.logprobs, "entropies": scores.entropies}
        if self.objective.needs_values:
            if scores.values is None:
                raise ValueError(f"objective {self.objective.kind} needs a value head; set value_head=True")
            fields["old_values"] = scores.values
        if self.objective.kl and self.reference is not None:
            fields["reference_logprobs"] = self.reference(batch, temperature).logprobs
        return Batch(**batch, **fields)

    def measure(self, batches: list[Batch], rewards: Tensor, completions: list[SampledCompletion]) -> list[float]:
        """The values of ROLLOUT_METRICS."""
        if self.objective.temperature == 1:
            logprobs = [batch.old_logprobs for batch in batches]
        else:  # those of the engine are of temperature 1
            logprobs = [self.scorer(batch, 1.0).logprobs for batch in batches]
        ours = torch.cat([values[b.weights > 0] for values, b in zip(logprobs, batches, strict=True)]).double()
        gaps = (ours - torch.tensor([p for c in completions for p in c.logprobs], dtype=torch.float64)).abs()
        single = next(self.scorer.model.parameters()).dtype == torch.float32 and self.scorer.precision is nullcontext
        if gaps.max() > LARGE_GAP and single and not self._warned:
            self._warned = True
            self.note(
                f"the log-probabilities of engine and trainer differ by up to {gaps.max():.3g} for a token, more than "
                f"{LARGE_GAP} and than rounding explains; the samples are not those of the model that is trained"
            )
        length = len(ours) / len(completions)
        truncated = sum(c.truncated for c in completions) / len(completions)
        std, equal = float(rewards.std()) if len(rewards) > 1 else 0.0, self.share_of_equal_rewards(rewards)
        return [float(rewards.mean()), std, equal, length, truncated, float(gaps.mean()), float(gaps.max())]

    def share_of_equal_rewards(self, rewards: Tensor) -> float:
        """Of the prompts whose completions are compared with each other: those that teach nothing."""
        if self.objective.group == 1:
            return 0.0
        groups = rewards.view(-1, self.objective.group)
        share = float((groups == groups[:, :1]).all(1).double().mean())
        if share == 1 and not self._noted_equal:
            self._noted_equal = True
            self.note(
                f"all {self.objective.group} completions of every prompt of a rollout have the same reward, so this "
                "step learns nothing from them; if this persists (`equal_rewards`), use other prompts or another reward"
            )
        return share

    def check_guards(self, batches: list[Batch]) -> None:
        objective, tokens = self.objective, sum(float((batch.weights > 0).sum()) for batch in batches)
        entropy = sum(float(batch.entropies.sum()) for batch in batches) / tokens
        if entropy < objective.min_entropy:
            raise ValueError(
                f"the entropy of the samples is {entropy:.3g} nats per token, below objective.min_entropy="
                f"{objective.min_entropy}: the model has collapsed to one completion per prompt and learns nothing "
                f"more; start again with a larger kl, a smaller train.lr or a higher temperature; {STOPS_AGAIN}"
            )
        if objective.kl:
            # The mean of log π / π_ref. In the k3 estimate, π_ref / π of one token that only the reference makes likely
            # can be larger than the sum of all others.
            kl = sum(float((batch.old_logprobs - batch.reference_logprobs).sum()) for batch in batches) / tokens
            if not kl <= objective.max_kl:
                raise ValueError(
                    f"the divergence from the model before training is {kl:.3g} nats per token, above objective.max_kl="
                    f"{objective.max_kl}; start again with a larger kl or a smaller train.lr, or raise max_kl; "
                    f"{STOPS_AGAIN}"
                )

    def finish(self, batches: list[Batch], rewards: Tensor, measured: list[float]) -> list[Batch]:
        """The batches with advantages, the weights of tokens and the measurements of the rollout."""
        objective, finished = self.objective, []
        for batch, fields in zip(batches, objective.token_fields(batches, rewards, self._kl), strict=True):
            counted = (batch.weights > 0).float()
            fields["weights"] = counted * objective.sequence_weights(counted.sum(1)).unsqueeze(1)
            fields = {name: tensor for name, tensor in batch.items() if name != "entropies"} | fields
            finished.append(Batch(**fields))
        row = torch.tensor([*measured, *objective.measure(finished, self._kl)], dtype=torch.float64)
        self._kl = objective.next_kl(finished, self._kl)
        return [Batch(**batch, rollout=row.expand(batch.size, -1).clone()) for batch in finished]

    def state_dict(self) -> dict[str, Any]:
        return {
            "source": self.examples.name,
            "fingerprint": self.examples.fingerprint,
            "next": self._next_example,
            "samples": self._samples,
            "done": self._done,
            "kl": self._kl,
            "rollout": self._encoded,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, current in (("source", self.examples.name), ("fingerprint", self.examples.fingerprint)):
            if state[name] != current:
                raise ValueError(
                    f"the saved position in the prompts has {name}={state[name]!r}, these prompts {current!r}; resume "
                    "with the same data"
                )
        self._next_example, self._samples, self._done = state["next"], state["samples"], state["done"]
        self._kl = state.get("kl", self.objective.kl)  # older runs have no adapted coefficient
        self._encoded = state["rollout"]
        self._batches = [decode_batch(encoded) for encoded in self._encoded]


class HeldOutRewards:
    """The rewards of greedy completions of the first held-out prompts, generated anew in every evaluation."""

    def __init__(self, loader: RolloutLoader, examples: Examples, count: int):
        count = count if examples.count is None else min(count, examples.count)
        reader = Prompts(examples, loader.tokenizer, loader.prompts.length, loader.objective.max_new, loader.note)
        found = [reader.read(index) for index in range(count)]
        self.loader, self.prompts = loader, [prompt for prompt in found if prompt is not None]
        reader.report(count - len(self.prompts), count)

    def __iter__(self) -> Iterator[Batch]:
        loader, rows = self.loader, self.loader.rows
        for first in range(0, len(self.prompts), rows):
            prompts = self.prompts[first : first + rows]
            completions = loader.generate([ids for _, ids in prompts], [0] * len(prompts), 0.0)
            rewards = loader.rate([example for example, _ in prompts], completions)
            yield Batch(rewards=torch.tensor(rewards), lengths=torch.tensor([float(len(c.ids)) for c in completions]))


def sample_seed(seed: int, number: int) -> int:
    """A seed of 63 bits: -1 would be a random one."""
    return int.from_bytes(blake2b(f"{seed}/{number}".encode(), digest_size=8).digest()) >> 1


def encode_batch(batch: Batch) -> dict[str, Any]:
    """A batch as JSON: for every field its type, its shape and its bytes in base64."""
    arrays = {name: tensor.contiguous().numpy() for name, tensor in batch.items()}
    return {
        name: [str(array.dtype), list(array.shape), base64.b64encode(array.tobytes()).decode()]
        for name, array in arrays.items()
    }


def decode_batch(encoded: dict[str, Any]) -> Batch:
    tensors = {}
    for name, (dtype, shape, content) in encoded.items():
        array = np.frombuffer(base64.b64decode(content), dtype=dtype).reshape(shape)
        tensors[name] = torch.from_numpy(array.copy())
    return Batch(**tensors)
