"""Evaluation: the objective over held-out batches, divided once by the whole count, as in training."""

import math
from collections.abc import Iterable
from contextlib import nullcontext

import torch
from torch import nn

from regard.data.batch import Batch
from regard.objectives.base import Objective
from regard.training.runtime import Precision


@torch.no_grad()
def evaluate(
    model: nn.Module, objective: Objective, batches: Iterable[Batch], precision: Precision = nullcontext
) -> dict[str, float]:
    """`loss` and the objective's metrics. The model is left in the mode it came in."""
    device, mode = next(model.parameters()).device, model.training
    model.eval()
    count, sums = 0.0, {}
    for batch in batches:
        with precision():
            loss, weight, metrics = objective(model, batch.to(device))
        count += float(weight)
        for name, value in {"loss": loss, **metrics}.items():
            sums[name] = sums.get(name, 0.0) + float(value)
    model.train(mode)
    return {name: value / count if count else math.nan for name, value in sums.items()}
