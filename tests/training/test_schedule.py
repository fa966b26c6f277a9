"""Schedules against closed forms and at their limits."""

import math

import pytest

from regard.spec import SpecError
from regard.training.schedule import Constant, Cosine, Schedule, WarmupStableDecay


def test_the_rate_is_constant_after_a_linear_warmup() -> None:
    assert [Constant(warmup=4).factor(k, 8) for k in range(8)] == [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]
    assert Constant().factor(0, 8) == 1


@pytest.mark.ledger("tr.warmup")
@pytest.mark.parametrize("warmup", [0, 10])
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_cosine_equals_its_closed_form(warmup: int, floor: float) -> None:
    schedule, steps = Cosine(warmup=warmup, floor=floor), 110
    for k in range(warmup):
        assert schedule.factor(k, steps) == pytest.approx((k + 1) / 10, abs=1e-15)
    for k in range(warmup, steps):
        angle = math.pi * (k - warmup) / (steps - warmup)
        # the same curve by the half-angle formula: (1 + cos a) / 2 = cos²(a / 2)
        assert schedule.factor(k, steps) == pytest.approx(floor + (1 - floor) * math.cos(angle / 2) ** 2, abs=1e-12)
    assert schedule.factor(warmup, steps) == 1
    assert schedule.factor(steps, steps) == pytest.approx(floor, abs=1e-15)


def test_warmup_stable_decay_equals_its_closed_form() -> None:
    schedule = WarmupStableDecay(warmup=10, decay=0.25, floor=0.0)
    values = [schedule.factor(k, 100) for k in range(100)]
    assert values[:10] == [(k + 1) / 10 for k in range(10)]
    assert values[10:76] == [1.0] * 66
    assert values[75:] == pytest.approx([1 - math.sqrt(i / 25) for i in range(25)], abs=1e-15)
    assert schedule.factor(100, 100) == 0


@pytest.mark.parametrize("schedule", [Cosine(warmup=7), WarmupStableDecay(warmup=7), WarmupStableDecay(decay=1.0)])
@pytest.mark.parametrize("steps", [1, 2, 5, 50])
def test_every_factor_is_positive_and_at_most_one(schedule: Schedule, steps: int) -> None:
    assert all(0 < schedule.factor(k, steps) <= 1 for k in range(steps))


@pytest.mark.parametrize(
    "make", [lambda: Cosine(warmup=-1), lambda: Cosine(floor=1.5), lambda: WarmupStableDecay(decay=0.0)]
)
def test_wrong_schedules_are_refused(make) -> None:
    with pytest.raises(SpecError, match="must"):
        make()
