"""Speculation's arithmetic against a simulation of it."""

import random

import pytest

from regard.plan.speculation import best_drafts, expected_tokens, speculation_plan, speedup


@pytest.mark.ledger("spec.expected", "calc.spec")
@pytest.mark.parametrize("acceptance, tokens", [(0.6, 2.38), (0.8, 3.69), (0.9, 4.69), (1.0, 6.0), (0.0, 1.0)])
def test_expected_tokens_of_five_drafts(acceptance, tokens):
    assert expected_tokens(acceptance, 5) == pytest.approx(tokens, abs=0.005)
    if acceptance < 1:
        assert expected_tokens(acceptance, 5) == pytest.approx((1 - acceptance**6) / (1 - acceptance))


@pytest.mark.ledger("spec.expected", "calc.spec")
@pytest.mark.parametrize("acceptance", [0.3, 0.8])
def test_a_simulation_accepts_as_many(acceptance):
    draw = random.Random(0)

    def one_pass(drafts: int) -> int:
        accepted = 0
        while accepted < drafts and draw.random() < acceptance:
            accepted += 1
        return accepted + 1  # the target's own token

    passes = 40_000
    mean = sum(one_pass(4) for _ in range(passes)) / passes
    assert mean == pytest.approx(expected_tokens(acceptance, 4), abs=3 * 2 / passes**0.5)


@pytest.mark.ledger("calc.spec")
def test_drafting_costs_something():
    assert speedup(1.0, 5, 0.1) == pytest.approx(4.0)  # not 5: drafts take time, and a token more comes out
    assert speedup(0.8, 0, 0.1) == 1.0
    assert best_drafts(0.8, 0.0, most=64) == 64  # free drafts: as many as allowed
    assert best_drafts(0.2, 0.5) == 0  # dear and wrong: none
    best = best_drafts(0.8, 0.05)
    assert speedup(0.8, best, 0.05) == max(speedup(0.8, drafts, 0.05) for drafts in range(30))
    assert speculation_plan(0.8, 0.05)["speculation"]["best_drafts"] == best


@pytest.mark.parametrize(
    "arguments, message",
    [((1.2, 3, 0), "acceptance=1.2"), ((0.5, -1, 0), "drafts=-1"), ((0.5, 1, -1), "cost=-1")],
)
def test_what_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        speedup(*arguments)
