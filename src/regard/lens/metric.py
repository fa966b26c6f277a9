"""Metrics: the number that patching, circuit tests and attributions explain, a function of logits (B, L, V) to (B,)."""

from collections.abc import Callable

from torch import Tensor

Metric = Callable[[Tensor], Tensor]


def logit_difference(answer: int, wrong: int, position: int = -1) -> Metric:
    """The metric logit(answer) - logit(wrong) at a position, by default the last."""
    return lambda logits: logits[:, position, answer] - logits[:, position, wrong]
