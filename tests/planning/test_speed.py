"""Devices, and the expected speedup of speculative decoding, compared with a simulation."""

import random

import pytest

from regard.planning.groups import speculation_groups
from regard.planning.speed import DEVICES, best_drafts, device_of, expected_tokens, speedup


@pytest.mark.ledger("spec.expected", "calc.spec")
@pytest.mark.parametrize("acceptance, tokens", [(0.6, 2.38), (0.8, 3.69), (0.9, 4.69), (1.0, 6.0), (0.0, 1.0)])
def test_expected_tokens_of_five_drafts_equal_a_geometric_sum(acceptance, tokens):
    assert expected_tokens(acceptance, 5) == pytest.approx(tokens, abs=0.005)
    if acceptance < 1:
        assert expected_tokens(acceptance, 5) == pytest.approx((1 - acceptance**6) / (1 - acceptance))


@pytest.mark.ledger("spec.expected", "calc.spec")
@pytest.mark.parametrize("acceptance", [0.3, 0.8])
def test_expected_tokens_equal_a_simulation(acceptance):
    rng = random.Random(0)

    def one_pass(drafts: int) -> int:
        accepted = 0
        while accepted < drafts and rng.random() < acceptance:
            accepted += 1
        return accepted + 1  # the target's own token

    passes = 40_000
    mean = sum(one_pass(4) for _ in range(passes)) / passes
    assert mean == pytest.approx(expected_tokens(acceptance, 4), abs=3 * 2 / passes**0.5)


@pytest.mark.ledger("calc.spec")
def test_speedup_accounts_for_the_cost_of_drafts():
    assert speedup(1.0, 5, 0.1) == pytest.approx(4.0)  # 6 tokens in the time of 1.5 passes
    assert speedup(0.8, 0, 0.1) == 1.0
    assert best_drafts(0.8, 0.0, max_drafts=64) == 64  # free drafts
    assert best_drafts(0.2, 0.5) == 0  # drafts that are expensive and rarely accepted
    best = best_drafts(0.8, 0.05)
    assert speedup(0.8, best, 0.05) == max(speedup(0.8, drafts, 0.05) for drafts in range(30))
    assert speculation_groups(0.8, 0.05)["speculation"]["best_drafts"] == best


@pytest.mark.parametrize(
    "arguments, message",
    [((1.2, 3, 0), "acceptance=1.2"), ((0.5, -1, 0), "drafts=-1"), ((0.5, 1, -1), "cost=-1")],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        speedup(*arguments)


@pytest.mark.ledger("flash.sram")
def test_devices_have_the_fast_memory_of_their_multiprocessor():
    assert DEVICES["a100"].l1_cache == 192 * 1024
    assert (DEVICES["h100"].l1_cache, DEVICES["h100"].shared_memory) == (256 * 1024, 227 * 1024)
    with pytest.raises(ValueError, match="did you mean 'h100'"):
        device_of("h10")
