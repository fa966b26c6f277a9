"""What the objectives of autoencoders, variational autoencoders and GANs have in common: examples without tokens.

An example has an `image`, or a `point` with its coordinates. Noise is drawn from the generator of the example, which is
seeded with its index, so a step does not depend on how a batch is split, and a resumed run draws the same noise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import ClassVar, Self

import numpy as np
import torch
from torch import nn

from regard.data.batch import Batch
from regard.data.packing import Item
from regard.data.sources.base import Example, Splits, shown
from regard.models.base import Model
from regard.models.generative.base import Generative
from regard.objectives.base import Columns, Objective
from regard.spec import require
from regard.text.tokenizer import Tokenizer

FIELDS = ("image", "point")


@dataclass(frozen=True)
class GenerativeObjective(Objective):
    trained: ClassVar[tuple[str, ...]] = ("*",)  # patterns of parameter names that its phases train

    def fit(self, splits: Splits, model: Model) -> Self:
        values, name = values_of(splits.train.example(0)), splits.train.name
        assert isinstance(model, Generative), "checked in check_model"
        require(
            values.shape == model.shape,
            f"the examples of {name} have the shape {values.shape}, and the model takes {model.shape}; set "
            f"model.shape={list(values.shape)}",
        )
        return self

    def tokenize(self, example: Example, tokenizer: Tokenizer) -> Columns:
        return {"data": values_of(example)}

    def collate(self, rows: Sequence[Sequence[Item]], tokenizer: Tokenizer, length: int) -> Batch:
        items = [item for row in rows for item in row]
        shape = items[0]["data"].shape
        for values in (item["data"] for item in items):
            if values.shape != shape:
                raise ValueError(
                    f"the example {values.tolist()!r:.80} has the shape {values.shape}, and another one {shape}; "
                    "correct it, or leave it out"
                )
        return Batch(**{name: torch.from_numpy(np.stack([item[name] for item in items])) for name in items[0]})


@dataclass(frozen=True)
class WithCodes(GenerativeObjective):
    """Objectives whose batches have the noise of codes."""

    latent: int = 0  # numbers of a code; 0: those of the model

    def fit(self, splits: Splits, model: Model) -> Self:
        super().fit(splits, model)
        assert isinstance(model, Generative), "checked in check_model"
        return replace(self, latent=model.latent)

    def check_latent(self, model: Generative) -> None:
        require(
            self.latent in (0, model.latent),
            f"objective.latent={self.latent}, but the codes of the model have {model.latent} numbers; leave it out",
        )

    def sample(self, columns: Columns, tokenizer: Tokenizer, length: int, rng: np.random.Generator) -> list[Item]:
        return [{**columns, "noise": rng.standard_normal(self.latent, np.float32)}]


def values_of(example: Example) -> np.ndarray:
    """The image or the point of an example."""
    name = next((name for name in FIELDS if name in example), None)
    if name is None:
        raise ValueError(f"an example needs an image or a point; this one is {shown(example)}")
    return np.asarray(example[name], np.float32)


def phase_optimizers(
    model: nn.Module, rates: Mapping[str, float], betas: tuple[float, float], fused: bool | None = None
) -> dict[str, torch.optim.Adam]:
    """One Adam per phase. rates: the learning rates by the pattern of parameter names that a phase trains."""
    return {
        pattern: torch.optim.Adam(
            [p for name, p in model.named_parameters() if fnmatch(name, pattern)], rate, betas, fused=fused
        )
        for pattern, rate in rates.items()
    }


def train_phase(
    model: nn.Module,
    objective: Objective,
    batch: Batch,
    step: int,
    optimizers: Mapping[str, torch.optim.Optimizer],
) -> float:
    """Update the parameters that this step trains, by their optimizer. Returns the loss; gradients are kept."""
    phase = objective.phase(step)
    loss, count, _ = phase.loss(model, batch)
    model.zero_grad()
    (loss / count).backward()
    optimizers[phase.trains].step()
    return loss.item() / count.item()
