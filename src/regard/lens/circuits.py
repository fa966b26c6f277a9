"""A circuit test: is the metric worse without these heads than without as many others?

Attention maps suggest what a head is for; only an intervention tests it. A drop after ablation alone proves little,
since any removal disturbs a model: compare it with the drops after removing random sets of the same size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.lens.ablation import ablate
from regard.lens.inputs import IdSequence, Metric, measure, rows_of
from regard.lens.maps import attention_heads

HeadIndex = tuple[int, int]  # layer, head


@dataclass(frozen=True)
class CircuitTest:
    """Means of the metric over the rows of the input."""

    whole: float  # of the model as it is
    ablated: float  # without the heads
    random: Tensor  # (trials,) without as many other heads

    @property
    def p_value(self) -> float:
        """The share of random sets whose ablation lowers the metric at least as much, with the tested set counted."""
        return (1 + int((self.random <= self.ablated).sum())) / (1 + len(self.random))


@torch.no_grad()
def circuit_test(
    model: nn.Module,
    ids: IdSequence,
    metric: Metric,
    heads: Sequence[HeadIndex],
    trials: int = 20,
    seed: int = 0,
    mean_over: IdSequence | None = None,
) -> CircuitTest:
    """Ablate heads, and `trials` random sets of as many other heads of the model.

    ids: (L,) or (B, L). mean_over: see `ablate`; the heads get their mean over these tokens instead of 0.
    """
    rows = rows_of(model, ids)
    tested = list(dict.fromkeys(heads))
    others = [
        (layer, head)
        for layer, count in enumerate(attention_heads(model))
        for head in range(count)
        if (layer, head) not in tested
    ]
    if not tested or len(others) < len(tested):
        raise ValueError(
            f"the test needs 1 head or more and as many others; {len(tested)} are tested and {len(others)} are left"
        )

    def without(removed: Sequence[HeadIndex]) -> float:
        with ablate(model, heads=removed, mean_over=mean_over):
            return measure(model, rows, metric).mean().item()

    generator = torch.Generator().manual_seed(seed)
    draws = [torch.randperm(len(others), generator=generator)[: len(tested)].tolist() for _ in range(trials)]
    random = torch.tensor([without([others[i] for i in draw]) for draw in draws])
    return CircuitTest(measure(model, rows, metric).mean().item(), without(tested), random)
