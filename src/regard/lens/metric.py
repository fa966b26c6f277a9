"""Metrics: the number that patching, circuit tests and attributions explain, a function of logits (B, L, V) to (B,)."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

Metric = Callable[[Tensor], Tensor]


def logit_difference(answer: int, wrong: int, position: int = -1) -> Metric:
    """The metric logit(answer) - logit(wrong) at a position, by default the last."""
    return lambda logits: logits[:, position, answer] - logits[:, position, wrong]


def measure(model: nn.Module, ids: Tensor, metric: Metric) -> Tensor:
    """(B,): the metric of the model's logits for ids (B, L)."""
    logits: Any = model(ids)
    values = metric(logits)
    if values.shape != ids.shape[:1]:
        raise ValueError(f"the metric returned {tuple(values.shape)}; it must return one number per row, ({len(ids)},)")
    return values
