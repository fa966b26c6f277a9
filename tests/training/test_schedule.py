"""Schedules against closed forms and at their limits."""

import math
import tomllib
import warnings

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR
from transformers.optimization import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_inverse_sqrt_schedule,
    get_linear_schedule_with_warmup,
    get_wsd_schedule,
)

from regard.spec import SpecError
from regard.training.overrides import override, parse_overrides
from regard.training.recipe import Training
from regard.training.schedule import Constant, Cosine, InverseSqrt, LinearDecay, Schedule, WarmupStableDecay


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


def test_linear_decay_equals_its_closed_form() -> None:
    assert [LinearDecay(warmup=2).factor(k, 6) for k in range(7)] == [0.5, 1, 1, 0.75, 0.5, 0.25, 0]
    assert [LinearDecay(floor=0.5).factor(k, 4) for k in range(5)] == [1, 0.875, 0.75, 0.625, 0.5]


def test_inverse_sqrt_equals_the_rate_of_the_transformer() -> None:
    width, warmup = 512, 4000
    peak = (width * warmup) ** -0.5
    for t in (1, 100, 3999, 4000, 4001, 16000, 100000):
        expected = width**-0.5 * min(t**-0.5, t * warmup**-1.5)
        assert peak * InverseSqrt(warmup=warmup).factor(t - 1, 100000) == pytest.approx(expected, rel=1e-14)
    assert [InverseSqrt().factor(k, 9) for k in (0, 3, 8)] == [1, 0.5, pytest.approx(1 / 3)]


@pytest.mark.parametrize("warmup", [0, 10])
def test_values_equal_those_of_transformers_and_torch(warmup: int) -> None:
    """In their warm-up the factor of the first step is 0; here it is 1 / warmup. InverseSqrt is one step ahead."""
    steps, optimizer = 50, torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 1.0)
    decay = WarmupStableDecay(warmup, 0.2, 0.1)
    stable = steps - warmup - 10
    table = {
        Constant(warmup): (get_constant_schedule_with_warmup(optimizer, warmup), 0),
        LinearDecay(warmup): (get_linear_schedule_with_warmup(optimizer, warmup, steps), 0),
        Cosine(warmup, 0.0): (get_cosine_schedule_with_warmup(optimizer, warmup, steps), 0),
        InverseSqrt(warmup): (get_inverse_sqrt_schedule(optimizer, warmup, max(warmup, 1)), 1),
        decay: (get_wsd_schedule(optimizer, warmup, 10, None, stable, "linear", "1-sqrt", 0.1), 0),
    }
    for schedule, (reference, ahead) in table.items():
        for k in range(warmup, steps):
            if warmup or schedule.kind != "inverse_sqrt":
                assert schedule.factor(k, steps) == pytest.approx(reference.lr_lambdas[0](k + ahead), abs=1e-14)
    with warnings.catch_warnings():  # torch expects steps of the optimizer between those of the schedule
        warnings.simplefilter("ignore")
        torch_cosine = CosineAnnealingLR(optimizer, steps)
        torch_linear = LinearLR(optimizer, 1.0, 0.25, steps)
        for k in range(steps):
            optimizer.param_groups[0]["initial_lr"] = 1.0
            closed_form = torch_cosine._get_closed_form_lr()[0]
            assert Cosine(0, 0.0).factor(k, steps) == pytest.approx(closed_form, abs=1e-14)
            assert LinearDecay(0, 0.25).factor(k, steps) == pytest.approx(
                torch_linear._get_closed_form_lr()[0], abs=1e-14
            )
            torch_cosine.step()
            torch_linear.step()


def test_a_schedule_is_chosen_by_its_kind_in_files_and_flags() -> None:
    text = '[train]\nsteps = 9\n[train.schedule]\nkind = "linear"\nwarmup = 3\n'
    assert Training.from_dict(tomllib.loads(text)["train"]).schedule == LinearDecay(3)
    flags = parse_overrides(["--train.schedule.kind=inverse_sqrt", "--train.schedule.warmup=3"])
    tables = override({"train": {"steps": 9}}, flags)
    assert Training.from_dict(tables["train"]).schedule == InverseSqrt(3)
    with pytest.raises(SpecError, match="there is no kind 'linaer'; did you mean 'linear'"):
        Schedule.from_dict({"kind": "linaer"})
