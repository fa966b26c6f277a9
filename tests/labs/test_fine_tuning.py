"""The setting of the labs of fine-tuning: its language, its runs, and the predictions that follow from the losses."""

import math

import pytest
import torch

from regard.adapt.lora import LoRA
from regard.labs.experiment import Bench
from regard.labs.fine_tuning import LENGTH, SYMBOLS, Language, Tuned, pretrain, tune
from regard.labs.fit import generator
from regard.labs.lora_capacity import departure
from regard.labs.lora_rates import EARLY_RATE, FULL, RANKS, checks, minimum
from regard.labs.update_rank import energy


@pytest.fixture(scope="module")
def pretrained():
    return pretrain(Bench(size="quick"))


def test_as_many_rules_change_as_asked_and_all_pairs_stay_equally_frequent():
    language = Language.draw(generator(0))
    for rules in (64, 256, 1024):
        changed = language.change(rules, generator(1))
        assert (changed.rules != language.rules).sum() == rules
        assert changed.rules.sort(0).values.equal(torch.arange(SYMBOLS).unsqueeze(1).expand(SYMBOLS, SYMBOLS))


def test_the_floor_is_the_entropy_of_the_language():
    language = Language.draw(generator(0))
    sequences = language.sequences(generator(1), 4000)
    assert sequences.shape == (4000, LENGTH + 1)
    other = 0.1 / SYMBOLS
    entropy = -(0.9 + other) * math.log(0.9 + other) - (SYMBOLS - 1) * other * math.log(other)
    assert language.floor(sequences) == pytest.approx(entropy, abs=0.02)
    assert language.change(1024, generator(1)).floor(sequences) > 5  # every rule is a wrong one


def test_runs_start_from_the_same_loss_and_leave_the_base_model_as_it_was(pretrained):
    language, base = pretrained
    before = {name: value.clone() for name, value in base.state_dict().items()}
    full, lora = (tune(base, language, method, 1e-3, 4, 0) for method in (None, LoRA(rank=2)))
    assert full.curve[0] == lora.curve[0] and [step for step, _ in full.curve] == [0, 1, 2, 3, 4]
    assert full.curve[-1][1] < full.curve[0][1] and lora.curve[-1][1] < lora.curve[0][1]
    assert all(torch.equal(value, before[name]) for name, value in base.state_dict().items())
    assert 0 < full.learned < 1 and full.floor == lora.floor


def test_a_run_that_diverges_counts_as_the_base_model(pretrained):
    language, base = pretrained
    run = tune(base, language, None, 1e30, 4, 0)
    assert run.curve[-1] == (4, run.curve[0][1]) and run.learned == 0


def parabola(best: float, height: float = 1.0) -> list[tuple[float, float]]:
    return [(rate, height + 0.1 * math.log(rate / best) ** 2) for rate in (1e-4 * 2**k for k in range(9))]


def test_the_best_rate_lies_between_the_measured_ones():
    assert minimum(parabola(1.1e-3)) == pytest.approx(1.1e-3)
    assert minimum(parabola(1.0)) == pytest.approx(1e-4 * 2**8)  # beyond the range: its end


def rate_checks(full: float, ranks: tuple[float, ...], short: float, early: tuple[float, ...]) -> list[bool]:
    methods = [f"LoRA r {rank}" for rank in RANKS]
    long = {FULL: full} | dict(zip(methods, ranks, strict=True))
    best = {"short": long | {FULL: full * short}, "long": long}
    first_steps = {method: [(10.0, loss)] for method, loss in zip(methods, early, strict=True)}
    u_curves = {method: parabola(rate) for method, rate in long.items()}
    return [check.holds for check in checks(best, u_curves, first_steps, 10)]


def test_predictions_about_rates_hold_for_the_claimed_ones_only():
    assert all(rate_checks(2e-4, (1e-3, 2e-3, 2e-3, 2.4e-3), 0.6, (1.0, 1.01, 1.02, 1.0)))
    assert rate_checks(1e-3, (2e-3, 1e-3, 1e-3, 4e-3), 1.1, (1.0, 1.1, 1.0, 1.0)) == [False] * 7 + [True]
    assert EARLY_RATE == 1e-4 * 2**4


def test_a_rank_leaves_the_common_curve_where_its_loss_stays_above(pretrained):
    _, base = pretrained
    reference = Tuned(base, [(0, 3.0), (1, 2.0), (2, 1.0), (3, 0.5)], 0.5)
    low = Tuned(base, [(0, 3.0), (1, 2.01), (2, 1.5), (3, 1.2)], 0.5)
    assert departure(low, reference) == 1 and departure(reference, reference) == 3


def test_the_energy_of_a_matrix_of_rank_two_is_in_two_directions():
    u, v = torch.linalg.qr(torch.randn(40, 2, generator=generator(0)))[0], torch.eye(40)[:2]
    shares = energy([u @ torch.diag(torch.tensor([3.0, 1.0])) @ v])
    assert shares[1] == pytest.approx(0.9) and shares[2] == pytest.approx(1.0) == shares[128]
