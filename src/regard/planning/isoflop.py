"""IsoFLOP curves: the loss over the size at fixed compute, and how its minimum moves.

    loss(size, C)     between two token counts of a size, log L is taken as a straight line in log D
    parabola          log L over log N, through the lowest point and up to two on each side; its vertex is the optimum
    exponents         N ∝ C^a and D ∝ C^b, straight lines through the vertices

Hoffmann et al. 2022, approach 2. The runs may have any sizes and token counts; nothing is extrapolated, and no law is
assumed. C is the counted FLOPs of the runs, so a and b need not add up to 1: attention and the output layer take FLOPs
that are not proportional to N.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from regard.planning.scaling import ScalingRun
from regard.planning.scaling_fit import FittedInterval, ScalingFit, interval

CURVES = 8  # between the smallest and the largest compute that three sizes reach
LEAST_SIZES = 3  # of a parabola
SIDE = 2  # points on each side of the lowest one
LEAST_RANGE = 2.0  # of compute between the first and the last vertex of a line


@dataclass(frozen=True)
class IsoCurve:
    """The loss over the size at one compute. `size`, `tokens` and `loss` are those of the vertex."""

    compute: float
    points: tuple[tuple[float, float], ...]  # (N, loss)
    size: float | None = None  # None: the lowest point is the smallest or the largest size
    tokens: float | None = None
    loss: float | None = None


@dataclass(frozen=True)
class IsoFlops:
    curves: tuple[IsoCurve, ...]
    size_exponent: float | None = None  # a; None: too few vertices, or too near to each other
    token_exponent: float | None = None  # b
    size_interval: FittedInterval | None = None
    token_interval: FittedInterval | None = None


def isoflops(runs: Sequence[ScalingRun], fit: ScalingFit | None = None, draws: int = 0, seed: int = 0) -> IsoFlops:
    """The curves of these runs. fit: the law of the same runs, whose bootstrap draws give the intervals."""
    found = measure(runs)
    generator, sizes, tokens = torch.Generator().manual_seed(seed), [], []
    for _ in range(0 if fit is None or found.size_exponent is None else draws):
        assert fit is not None
        again = measure(fit.redraw(generator))
        if again.size_exponent is not None and again.token_exponent is not None:
            sizes.append(again.size_exponent)
            tokens.append(again.token_exponent)
    if len(sizes) <= draws // 2:  # most draws have no line
        return found
    return replace(found, size_interval=interval(sizes), token_interval=interval(tokens))


def measure(runs: Sequence[ScalingRun]) -> IsoFlops:
    lines = lines_by_size(runs)
    curves = tuple(curve(lines, compute) for compute in computes(lines))
    vertices = [found for found in curves if found.size is not None]
    if len(vertices) < 2 or vertices[-1].compute < LEAST_RANGE * vertices[0].compute:
        return IsoFlops(curves)
    x = [math.log(found.compute) for found in vertices]
    return IsoFlops(
        curves,
        slope(x, [math.log(found.size or 0) for found in vertices]),
        slope(x, [math.log(found.tokens or 0) for found in vertices]),
    )


SizeCurve = list[tuple[float, float, float]]  # (log C, log D, log L) of one size, by compute


def lines_by_size(runs: Sequence[ScalingRun]) -> dict[float, SizeCurve]:
    """The runs of every size that has several token counts; repetitions with other seeds are averaged."""
    groups: dict[tuple[float, float], list[ScalingRun]] = defaultdict(list)
    for run in runs:
        groups[run.parameters, run.tokens].append(run)
    lines: dict[float, SizeCurve] = defaultdict(list)
    for (size, tokens), group in sorted(groups.items()):
        loss = sum(math.log(run.loss) for run in group) / len(group)
        lines[size].append((math.log(group[0].flops), math.log(tokens), loss))
        if len(lines[size]) > 1 and lines[size][-2][0] >= lines[size][-1][0]:
            raise ValueError(
                f"{tokens:g} tokens with {size:g} parameters have flops={group[0].flops:g}, no more than fewer tokens; "
                "correct the flops of the runs, or leave them out"
            )
    return {size: line for size, line in lines.items() if len(line) > 1}


def computes(lines: dict[float, SizeCurve]) -> list[float]:
    """Compute at equal ratios over the range in which enough sizes were trained."""
    ends = sorted(end for line in lines.values() for end in (line[0][0], line[-1][0]))

    def sizes(compute: float) -> int:
        return sum(line[0][0] <= compute <= line[-1][0] for line in lines.values())

    reached = [end for end in ends if sizes(end) >= LEAST_SIZES]
    if not reached:
        return []
    low, high = reached[0], reached[-1]
    steps = [low + (high - low) * i / (CURVES - 1) for i in range(CURVES)] if high > low else [low]
    return [math.exp(step) for step in steps if sizes(step) >= LEAST_SIZES]


def curve(lines: dict[float, SizeCurve], compute: float) -> IsoCurve:
    """The curve of one compute, with the vertex of its parabola if the lowest point lies between others."""
    x, points, tokens = math.log(compute), [], []
    for size, line in sorted(lines.items()):
        for (c0, d0, loss0), (c1, d1, loss1) in pairwise(line):
            if c0 <= x <= c1:
                share = (x - c0) / (c1 - c0)
                points.append((math.log(size), loss0 + share * (loss1 - loss0)))
                tokens.append(d0 + share * (d1 - d0))
                break
    shown = IsoCurve(compute, tuple((math.exp(n), math.exp(loss)) for n, loss in points))
    lowest = min(range(len(points)), key=lambda i: points[i][1])
    if not 0 < lowest < len(points) - 1:
        return shown
    chosen = slice(max(0, lowest - SIDE), lowest + SIDE + 1)
    n, loss = torch.tensor(points[chosen], dtype=torch.float64).unbind(1)  # (P,)
    center = n.mean()
    powers = torch.stack([torch.ones_like(n), n - center, (n - center) ** 2], -1)  # (P, 3)
    level, linear, square = torch.linalg.lstsq(powers, loss.unsqueeze(-1)).solution.squeeze(-1).tolist()
    vertex = -linear / (2 * square) if square > 0 else math.inf
    if not n[0] - center < vertex < n[-1] - center:
        return shown
    at = vertex + center.item()
    data = slope(n.tolist(), tokens[chosen]) * (at - center.item()) + sum(tokens[chosen]) / len(tokens[chosen])
    minimum = level + linear * vertex + square * vertex**2
    return replace(shown, size=math.exp(at), tokens=math.exp(data), loss=math.exp(minimum))


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Of the straight line of least squares."""
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    product = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return product / sum((a - mean_x) ** 2 for a in x)
