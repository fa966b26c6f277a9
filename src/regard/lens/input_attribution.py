"""How much each input token contributes to a number that is computed from the logits, by gradients.

    gradient × input        a_i = x_i · ∂F/∂x_i
    integrated gradients    a_i = (x_i - b_i) · ∫₀¹ ∂F/∂x_i (b + α (x - b)) dα       (Sundararajan et al. 2017)

x is the residual stream before the first layer (`stack.input`), b a baseline, F the metric, a function of the logits
(B, L, V) to one number per row. Integrated gradients are complete: they add up to F(x) - F(b), whatever the model.
"""

import warnings
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from regard.lens.hooks import patch, record
from regard.lens.inputs import IdSequence, Metric, measure, rows_of

POINTS, WEIGHTS = np.polynomial.legendre.leggauss(8)  # on [-1, 1]


class IntegratedGradients(NamedTuple):
    tokens: Tensor  # (B, L)
    difference: Tensor  # (B,) F(x) - F(b)

    @property
    def error(self) -> Tensor:
        """(B,) by which the tokens do not add up to the difference."""
        return (self.tokens.sum(-1) - self.difference).abs()


def gradient_times_input(model: nn.Module, ids: IdSequence, metric: Metric, name: str = "stack.input") -> Tensor:
    """(B, L) for ids (L,) or (B, L). name: the activation that counts as the input."""
    (rows,) = rows_of(model, ids)
    x = activation(model, rows, name)
    _, gradient = metric_gradient(model, rows, metric, name, x)
    return (x * gradient).sum(-1)


def integrated_gradients(
    model: nn.Module,
    ids: IdSequence,
    metric: Metric,
    baseline: Tensor | None = None,
    tolerance: float = 1e-3,
    max_intervals: int = 256,
    name: str = "stack.input",
) -> IntegratedGradients:
    """The integral by adaptive quadrature.

    The integral over a part of the path is known to add up to the difference of F at its ends. So the part with the
    largest error is halved until all errors together are at most `tolerance` of the whole difference, or of 1 if that
    is less. Many models need this near a baseline of zeros, where their normalization is almost a step.

    baseline: of the shape of x, or of a token; None: zeros. A warning tells if `max_intervals` were not enough.
    """
    (rows,) = rows_of(model, ids)
    x = activation(model, rows, name)
    start = torch.zeros_like(x) if baseline is None else baseline.to(x).expand_as(x)

    def gradient_at(alpha: float) -> tuple[Tensor, Tensor]:
        return metric_gradient(model, rows, metric, name, torch.lerp(start, x, alpha))

    def integrate(low: End, high: End) -> Interval:
        half, middle = (high.alpha - low.alpha) / 2, (high.alpha + low.alpha) / 2
        total = torch.zeros_like(x)
        for point, weight in zip(POINTS, WEIGHTS, strict=True):
            total += half * float(weight) * gradient_at(middle + half * float(point))[1]
        tokens = (total * (x - start)).sum(-1)
        return Interval(low, high, tokens, (tokens.sum(-1) - (high.value - low.value)).abs())

    low, high = (End(alpha, gradient_at(alpha)[0]) for alpha in (0.0, 1.0))
    difference = high.value - low.value
    allowed = tolerance * difference.abs().clamp(min=1)
    intervals = [integrate(low, high)]
    while ((error := torch.stack([interval.error for interval in intervals]).sum(0)) > allowed).any():
        if len(intervals) >= max_intervals:
            message = f"integrated gradients add up only to within {error.max():.2g}; raise max_intervals"
            warnings.warn(message, stacklevel=2)
            break
        worst = intervals.pop(max(range(len(intervals)), key=lambda i: float((intervals[i].error / allowed).max())))
        alpha = (worst.low.alpha + worst.high.alpha) / 2
        middle = End(alpha, gradient_at(alpha)[0])
        intervals += [integrate(worst.low, middle), integrate(middle, worst.high)]
    return IntegratedGradients(torch.stack([interval.tokens for interval in intervals]).sum(0), difference)


class End(NamedTuple):
    """A point of the path, with the metric there."""

    alpha: float
    value: Tensor  # (B,)


class Interval(NamedTuple):
    low: End
    high: End
    tokens: Tensor  # (B, L) the integral
    error: Tensor  # (B,)


def activation(model: nn.Module, ids: Tensor, name: str) -> Tensor:
    with torch.no_grad(), record(model, name) as recorded:
        model(ids)
    return recorded[name]


def metric_gradient(model: nn.Module, ids: Tensor, metric: Metric, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """The metric (B,) with x in place of an activation, and its gradient with respect to x."""
    x = x.detach().requires_grad_()
    with torch.enable_grad(), patch(model, {name: x}):
        value = measure(model, (ids,), metric)
    return value.detach(), torch.autograd.grad(value.sum(), x)[0]
