"""On-policy distillation: the teacher rates the tokens of completions that the model samples. Agarwal et al. 2023.

    with probability on_policy      prompts of the examples -> completions by the engine -> D(p, q) of their tokens
    otherwise                       a batch of the examples

Examples show the model only prefixes that others wrote. On its own completions it learns how the teacher would continue
after its mistakes. Gradients do not pass through the sampling.

Which batches are sampled, and their seeds, depend on the run's seed and on the number of the batch. A batch is used
once, so the state holds only positions, and a run that is stopped after any step resumes bit-identically.
"""

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from regard.data.batch import Batch
from regard.data.loader import Loader
from regard.data.sources.base import Examples
from regard.objectives.distillation import Distillation
from regard.objectives.reinforcement import sampled_batch
from regard.training.rollouts import Generate, Prompts, sample_seed

TEMPERATURE = 1.0  # of sampling: the model's own distribution


class OnPolicyLoader:
    """The batches of a loader, of which a share is replaced by batches of sampled completions."""

    def __init__(
        self,
        loader: Loader,
        examples: Examples,
        objective: Distillation,
        generate: Generate,
        note: Callable[[str], None] = lambda text: None,
    ):
        self.loader, self.examples, self.objective, self.generate = loader, examples, objective, generate
        self.prompts = Prompts(examples, loader.tokenizer, loader.length, objective.max_new, note)
        self._batches = self._next_example = 0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        chance = Random(f"on-policy/{self.loader.seed}/{self._batches}").random()
        batch = self.sample() if chance < self.objective.on_policy else next(self.loader)
        self._batches += 1
        return batch

    def sample(self) -> Batch:
        """A batch of completions, one for each of the next prompts."""
        rows = self.loader.rows
        found, index = self.prompts.find(self._next_example, rows)
        prompts = [ids for _, ids in found]
        seeds = [sample_seed(self.loader.seed, self._batches * rows + n) for n in range(rows)]
        completions = self.generate(prompts, seeds, TEMPERATURE)
        self._next_example = index
        sequences = [(ids, c.ids) for ids, c in zip(prompts, completions, strict=True)]
        return sampled_batch(sequences, self.loader.tokenizer)

    def state_dict(self) -> dict[str, Any]:
        return {"loader": self.loader.state_dict(), "batches": self._batches, "next": self._next_example}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state["loader"])
        self._batches, self._next_example = state["batches"], state["next"]

    def __getattr__(self, name: str) -> Any:
        """The sizes of the loader, for the summary of the run."""
        return getattr(self.loader, name)
