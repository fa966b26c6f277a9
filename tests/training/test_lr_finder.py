"""The range test: its rates, when it stops, what it suggests, and that it changes nothing."""

import math
from dataclasses import replace

import pytest
import torch

from regard.objectives.next_token import next_token
from regard.spec import SpecError
from regard.training.lr_finder import RateSweep, RunningMean, sweep_learning_rate, table_rows
from regard.training.optimizer import SGD
from tests.training.tiny import SETTINGS, SPEC, loader


def test_a_sweep_trains_a_copy_with_growing_rates() -> None:
    model, data, seen = SPEC.build(0), loader(), []
    next(data)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    position, generator = data.state_dict(), torch.get_rng_state()
    sweep = sweep_learning_rate(model, data, next_token, SETTINGS, 1e-5, 1e-1, 21, lambda *values: seen.append(values))
    assert sweep.rates == pytest.approx([10 ** (-5 + 4 * k / 20) for k in range(21)][: len(sweep.rates)])
    assert [(rate, loss) for _, rate, loss in seen] == list(zip(sweep.rates, sweep.losses, strict=True))
    assert 1e-5 < sweep.suggestion < 1e-1 and min(sweep.losses) < sweep.losses[0]
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    assert data.state_dict() == position and torch.equal(torch.get_rng_state(), generator)
    again = sweep_learning_rate(model, data, next_token, SETTINGS, 1e-5, 1e-1, 21)
    assert again == sweep


def test_a_sweep_stops_when_training_diverges() -> None:
    settings = replace(SETTINGS, optimizer=SGD(), clip=0.0)
    sweep = sweep_learning_rate(SPEC.build(0), loader(), next_token, settings, 1e-3, 1e6, 40)
    assert len(sweep.rates) < 40 and sweep.diverged is not None
    assert sweep.suggestion <= sweep.diverged / 10


def curve(loss_of) -> RateSweep:
    rates = [10 ** (-6 + 6 * k / 99) for k in range(100)]
    return RateSweep(rates, [loss_of(math.log10(rate)) for rate in rates], None)


def test_the_suggestion_is_the_steepest_descent_with_a_margin() -> None:
    sweep = curve(lambda x: 5 - 2 / (1 + math.exp(-4 * (x + 3))))  # a fall that is steepest at 10⁻³
    assert sweep.suggestion == pytest.approx(1e-3, rel=0.2)
    assert replace(sweep, diverged=5e-3).suggestion == pytest.approx(5e-4)
    assert replace(sweep, diverged=1.0).suggestion == pytest.approx(1e-3, rel=0.2)


def test_smoothing_has_no_delay_and_keeps_a_line() -> None:
    sweep = curve(lambda x: 5 - x)
    for smooth, loss in list(zip(sweep.smoothed, sweep.losses, strict=True))[25:-25]:
        assert smooth == pytest.approx(loss, abs=1e-9)
    assert len(table_rows(sweep)) in range(11, 15) and table_rows(sweep)[-1][0] == sweep.rates[-1]


def test_divergence_is_a_rise_of_half_the_fall() -> None:
    mean = RunningMean()
    assert not any(mean.add(loss) for loss in [8.0] * 5 + [2.0] * 30)  # a fall of 6
    rises = [mean.add(loss) for loss in [4.9] * 30]
    assert not any(rises) and any(mean.add(loss) for loss in [5.2] * 30)
    noisy = RunningMean()
    assert not any(noisy.add(loss) for loss in [4.0, 4.9, 3.9, 4.8] * 10)


@pytest.mark.parametrize(
    ("options", "message"), [({"lowest": 1.0}, "0 < lowest < highest"), ({"steps": 3}, "steps=3 is too few")]
)
def test_wrong_ranges_are_refused(options: dict, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        sweep_learning_rate(SPEC.build(0), loader(), next_token, SETTINGS, **options)
