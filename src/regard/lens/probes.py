"""Linear probes (Alain & Bengio 2016): whether a property of tokens can be read from activations by a linear map.

    with record(model, "stack.blocks.3") as recorded:
        model(ids)
    probe = fit_probe(recorded["stack.blocks.3"].flatten(0, 1), labels)
    probe.accuracy(held_out, held_out_labels)

A probe may learn the property itself instead of finding it. So compare it with a probe of a control task (Hewitt &
Liang 2019), in which every kind of token has a random label: what exceeds its accuracy is the selectivity.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Probe:
    weight: Tensor  # (classes, D)
    bias: Tensor  # (classes,)

    def logits(self, x: Tensor) -> Tensor:
        """(…, D) -> (…, classes)"""
        return F.linear(x.to(self.weight), self.weight, self.bias)

    def accuracy(self, x: Tensor, labels: Tensor) -> float:
        return (self.logits(x).argmax(-1) == labels.to(self.weight.device)).double().mean().item()


def fit_probe(x: Tensor, labels: Tensor, l2: float = 1.0, steps: int = 500) -> Probe:
    """Multinomial logistic regression on x (N, D) and labels (N,) from 0, in float64, by L-BFGS.

    Minimizes Σ cross-entropy + l2/2 ‖W‖²; scikit-learn's LogisticRegression(C=1/l2) has the same minimum.
    """
    if x.dim() != 2 or labels.shape != x.shape[:1]:
        shapes = f"{tuple(x.shape)} and {tuple(labels.shape)}"
        raise ValueError(f"activations and labels have the shapes {shapes}; they must be (N, D) and (N,)")
    if labels.min() < 0 or l2 <= 0:
        raise ValueError("labels must be numbers from 0, and l2 must be positive")
    x, labels = x.detach().double(), labels.to(x.device)
    center = x.mean(0)  # shifts only the bias, which has no penalty
    weight = x.new_zeros(int(labels.max()) + 1, x.shape[1], requires_grad=True)
    bias = x.new_zeros(len(weight), requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weight, bias], max_iter=steps, tolerance_grad=1e-8, tolerance_change=1e-14, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        logits = F.linear(x - center, weight, bias)
        value = F.cross_entropy(logits, labels, reduction="sum") + l2 / 2 * weight.square().sum()
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(loss)
    return Probe(weight.detach(), (bias - weight @ center).detach())


def control_labels(ids: Tensor, labels: Tensor, seed: int = 0) -> Tensor:
    """Labels of a control task: each token id has a random one, drawn as often as the given labels occur."""
    generator = torch.Generator().manual_seed(seed)
    kinds, index = ids.cpu().unique(return_inverse=True)
    drawn = labels.cpu().flatten()[torch.randint(labels.numel(), kinds.shape, generator=generator)]
    return drawn[index].to(labels)
