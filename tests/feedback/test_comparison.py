"""Win rates: Wilson's interval, ties, decisions by rewards and by a judge."""

from collections.abc import Sequence

import pytest

from regard.data.sources.base import Example
from regard.feedback.comparison import (
    Decision,
    count_wins,
    decide_by_judge,
    decide_by_reward,
    result_of,
    wilson_interval,
)
from regard.training.rewards import exact_match
from tests.feedback.conftest import BiasedJudge


@pytest.mark.parametrize(
    ("rate", "count", "low", "high"),
    [(0.8, 10, 0.4902, 0.9433), (0.0, 10, 0.0, 0.2775), (1.0, 10, 0.7225, 1.0), (0.5, 100, 0.4038, 0.5962)],
)
def test_wilson_intervals_have_the_values_of_the_tables(rate: float, count: int, low: float, high: float) -> None:
    assert wilson_interval(rate, count) == pytest.approx((low, high), abs=5e-5)


def test_wilson_bounds_are_the_rates_whose_standard_error_reaches_the_observed_one() -> None:
    for bound in wilson_interval(0.3, 40):
        assert abs(bound - 0.3) == pytest.approx(1.959964 * (bound * (1 - bound) / 40) ** 0.5)


def test_ties_count_half() -> None:
    found = count_wins([Decision(1.0), Decision(0.5), Decision(0.5), Decision(0.0), Decision(1.0)])
    assert (found.wins, found.ties, found.losses, found.rate) == (2, 2, 1, 0.6)
    assert found.low < 0.6 < found.high


def test_the_larger_reward_wins() -> None:
    examples = [{"prompt": "?", "answer": "yes"}] * 3
    decisions = decide_by_reward(exact_match, examples, ["yes", "no", "yes"], ["no", "yes", " yes "])
    assert [decision.result for decision in decisions] == [1.0, 0.0, 0.5]
    assert decisions[0].scores == (1.0, 0.0) and result_of(-1e-9) == 0.0


def test_a_reward_is_told_which_answers_are_cut_off() -> None:
    def complete(examples: Sequence[Example], texts: Sequence[str], truncated: Sequence[bool] = ()) -> list[float]:
        return [float(not cut) for cut in truncated]

    decisions = decide_by_reward(complete, [{}] * 3, ["a"] * 3, ["b"] * 3, ([True, False, True], [True, True, False]))
    assert [decision.result for decision in decisions] == [0.5, 1.0, 0.0]


@pytest.mark.parametrize("bias", [0.0, 5.0])
def test_the_judge_is_not_asked_about_equal_answers(bias: float) -> None:
    judge, examples = BiasedJudge(bias), [{"prompt": "1?"}, {"prompt": "2?"}, {"prompt": "3?"}]
    decisions = decide_by_judge(judge, examples, ["long", "same", "x"], ["no", " same", "xy"])
    assert [decision.result for decision in decisions] == [1.0, 0.5, 0.0]
    assert len(judge.questions) == 4 and decisions[1].verdict is None
