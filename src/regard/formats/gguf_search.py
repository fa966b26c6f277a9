"""Scales of the smallest squared error, for block formats that do not fix how they are chosen.

    one group      min over s (and m) of Σ (x - s c[Q] - m)²     Q: the nearest level
    a block        s ≈ d σ, m ≈ -e τ with integers σ, τ of every group and float16 numbers d, e of the block

A group is first rounded with several ranges around that of its numbers; for these codes the best s and m are those of
least squares. Then the integers next to s / d and -m / e are tried. llama.cpp's idea, with plain squares as the error.

Numbers have the shape (size, groups): the groups are columns.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

RANGES = 18  # tried for a group


class Levels:
    """numbers: integers in increasing order. step: their largest distance. largest: by its absolute value."""

    def __init__(self, numbers: Sequence[int]):
        self.numbers, self.lowest, self.highest = torch.tensor(numbers, dtype=torch.float32), numbers[0], numbers[-1]
        self.largest = max(-self.lowest, self.highest)
        distances = self.numbers.diff()
        self.step = distances.max().item()
        self.uniform = self.step == distances.min().item()
        # of every half: middles of two integers are halves, so the nearest level is constant between two of them
        middles = (self.numbers[1:] + self.numbers[:-1]) / 2
        self.halves = torch.bucketize(torch.arange(2 * self.lowest, 2 * self.highest + 1) / 2, middles, right=True)

    def nearest(self, x: Tensor) -> Tensor:
        """The nearest level of every number."""
        if self.uniform:
            return x.round().clamp_(self.lowest, self.highest)
        place = (2 * x).floor_().clamp_(2 * self.lowest, 2 * self.highest).sub_(2 * self.lowest)
        place.nan_to_num_(
            0.0
        )  # of weights that are refused later; as an integer, NaN is another number on every machine
        return self.numbers[self.halves].to(x.device)[place.int()]

    def codes(self, values: Tensor) -> Tensor:
        """The codes of levels."""
        if self.uniform:
            return (values - self.lowest).to(torch.uint8)
        return torch.bucketize(values, self.numbers.to(values.device)).to(torch.uint8)


class Fitted(NamedTuple):
    """Codes (size, groups); scale and minimum of every block; the integers of every group, if there are any."""

    codes: Tensor
    scale: Tensor
    minimum: Tensor | None = None
    scales: Tensor | None = None
    minima: Tensor | None = None


def fit_group(x: Tensor, levels: Levels) -> Fitted:
    """One float16 scale per group."""
    scale = fit_scale(x, levels).half().float()
    return Fitted(levels.codes(levels.nearest(divide(x, scale))), scale)


def fit_block(x: Tensor, levels: Levels, groups: int, limit: int, affine: bool) -> Fitted:
    """Integers up to `limit` for each of the `groups` of a block, whose unit is a float16 number."""
    scale, minimum = fit_affine(x, levels) if affine else (fit_scale(x, levels), x.new_zeros(x.shape[1]))
    unit, minimum_unit = (unit_of(numbers, groups, limit) for numbers in (scale, minimum))  # (blocks,)
    units, minimum_units = (numbers.repeat_interleave(groups) for numbers in (unit, minimum_unit))
    first, first_minimum = divide(scale, units).round(), divide(-minimum, minimum_units).round()
    lowest = 0 if affine else -limit
    best = (torch.full_like(scale, torch.inf), first, first_minimum)
    for minimum_shift in (0, -1, 1) if affine else (0,):
        for shift in (0, -1, 1):
            tried = (first + shift).clamp(lowest, limit), (first_minimum + minimum_shift).clamp(0, limit)
            s, m = tried[0] * units, tried[1] * minimum_units
            shifted = x + m
            errors = shifted - levels.nearest(divide(shifted, s)) * s
            bound = levels.step * s.abs() + (levels.largest + levels.step) / 2 * units + minimum_units / 2
            error = errors.square().sum(0)
            better = error < best[0]
            if shift or minimum_shift:  # the integers nearest to the fitted numbers are always within the bound
                better &= errors.abs_().amax(0) <= bound
            best = tuple(torch.where(better, new, old) for new, old in zip((error, *tried), best, strict=True))
    _, scales, minima = best
    codes = levels.codes(levels.nearest(divide(x + minima * minimum_units, scales * units)))
    return Fitted(codes, unit, minimum_unit if affine else None, scales, minima if affine else None)


def fit_scale(x: Tensor, levels: Levels) -> Tensor:
    """The scales (groups,) for which x is nearest to multiples of the levels."""
    peak = x.gather(0, x.abs().argmax(0, keepdim=True)).squeeze(0)
    plain = best = peak / levels.lowest  # the largest number gets the lowest level, which is the largest
    best_gain = torch.full_like(best, -torch.inf)
    for offset in offsets(levels):
        values = levels.nearest(x * divide(levels.lowest - offset, peak))
        product, square = (x * values).sum(0), values.square().sum(0)
        gain = divide(product.square(), square)  # Σ x² - Σ (x - s c)² for the s of least squares
        better = gain > best_gain
        best, best_gain = torch.where(better, divide(product, square), best), torch.where(better, gain, best_gain)
    largest_error = (x - levels.nearest(divide(x, best)) * best).abs_().amax(0)
    return torch.where(largest_error <= levels.step * best.abs(), best, plain)


def fit_affine(x: Tensor, levels: Levels) -> tuple[Tensor, Tensor]:
    """Scales and minima (groups,) for which x is nearest to s c + m. A minimum is at most 0."""
    low, high, size = x.amin(0).clamp_max(0), x.amax(0), len(x)
    extent, shifted = high - low, x - low
    plain = best = extent / levels.highest
    best_minimum, best_gain = low, torch.full_like(best, -torch.inf)
    total = x.sum(0)
    for offset in offsets(levels):
        values = levels.nearest(shifted * divide(levels.highest + offset, extent))
        product, square, count = (x * values).sum(0), values.square().sum(0), values.sum(0)
        determinant = size * square - count.square()
        scale = divide(size * product - total * count, determinant)
        minimum = divide(square * total - count * product, determinant)
        positive = minimum > 0
        scale, minimum = torch.where(positive, divide(product, square), scale), minimum.clamp_max(0)
        gain = scale * product + minimum * total
        better = (gain > best_gain) & (scale > 0)
        best, best_minimum = torch.where(better, scale, best), torch.where(better, minimum, best_minimum)
        best_gain = torch.where(better, gain, best_gain)
    moved = x - best_minimum
    largest_error = (moved - levels.nearest(divide(moved, best)) * best).abs_().amax(0)
    within = largest_error <= levels.step * best
    return torch.where(within, best, plain), torch.where(within, best_minimum, low)


def offsets(levels: Levels) -> list[float]:
    """By how many steps the range of a group is wider than that of the levels; negative: clipped by less than one."""
    return [levels.step * (place / 10 - 0.8) for place in range(RANGES)]


def unit_of(numbers: Tensor, groups: int, limit: int) -> Tensor:
    """Per block, the smallest float16 number of which no number of a group is more than `limit` multiples."""
    unit = numbers.view(-1, groups).abs().amax(-1) / limit
    half = unit.half()
    return (half.view(torch.int16) + (half.float() < unit)).view(torch.float16).float()  # + 1: the next number


def divide(numerator: Tensor | float, denominator: Tensor) -> Tensor:
    """0 where the denominator is 0."""
    return torch.where(denominator == 0, 0, numerator / denominator)
