"""Which of two models answers better: wins, ties and losses of A, and its win rate with a confidence interval.

    rate = (wins + ties / 2) / prompts

The interval is Wilson's (1927): the rates p for which the observed one lies within z standard errors √(p (1 - p) / n).
Unlike the normal interval it stays within 0 and 1. Ties vary less than wins and losses do, so with ties it is wider
than it needs to be.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from regard.data.sources.base import Example
from regard.feedback.judge import TEMPLATE, Judge, JudgeVerdict, judge_pairs
from regard.feedback.prompts import CountDone
from regard.objectives.reinforcement import prompt_of
from regard.training.rewards import ComputeRewards

Z_95 = 1.959964  # of a 95 % interval


class Decision(NamedTuple):
    """The result of a pair for A: 1 for a win, 0.5 for a tie, 0 for a loss."""

    result: float
    scores: tuple[float, float] | None = None  # by a reward
    verdict: JudgeVerdict | None = None  # by a judge; None for equal answers, which it is not asked about


class WinRate(NamedTuple):
    wins: int
    ties: int
    losses: int
    rate: float
    low: float
    high: float


def wilson_interval(rate: float, count: int, z: float = Z_95) -> tuple[float, float]:
    """The interval of an observed rate of `count` trials."""
    spread = z * z / count
    centre = (rate + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(rate * (1 - rate) / count + spread / (4 * count))
    return max(0.0, centre - half), min(1.0, centre + half)


def count_wins(decisions: Sequence[Decision]) -> WinRate:
    results = [decision.result for decision in decisions]
    rate = sum(results) / len(results)
    return WinRate(
        results.count(1.0), results.count(0.5), results.count(0.0), rate, *wilson_interval(rate, len(results))
    )


def decide_by_reward(
    reward: ComputeRewards,
    examples: Sequence[Example],
    answers: Sequence[str],
    others: Sequence[str],
    cut_off: tuple[Sequence[bool], Sequence[bool]] = ((), ()),
) -> list[Decision]:
    """The answer with the larger reward wins. cut_off: which answers of A and of B are not complete; () if all are."""
    return decide_by_scores(reward(examples, answers, cut_off[0]), reward(examples, others, cut_off[1]))


def decide_by_scores(scores: Sequence[float], others: Sequence[float]) -> list[Decision]:
    pairs = zip(scores, others, strict=True)
    return [Decision(result_of(first - second), (first, second)) for first, second in pairs]


def decide_by_judge(
    judge: Judge,
    examples: Sequence[Example],
    answers: Sequence[str],
    others: Sequence[str],
    template: str = TEMPLATE,
    principles: Sequence[str] = (),
    on_progress: CountDone = lambda done: None,
) -> list[Decision]:
    """By the mean log-odds of both orders; equal answers are a tie, and the judge is not asked."""
    pairs: list[tuple[Any, str, str]] = [
        (prompt_of(example), answer, other) for example, answer, other in zip(examples, answers, others, strict=True)
    ]
    differing = [pair for pair in pairs if differ(*pair[1:])]
    verdicts = iter(judge_pairs(judge, differing, template, principles, on_progress))
    decisions = []
    for _, answer, other in pairs:
        if differ(answer, other):
            verdict = next(verdicts)
            decisions.append(Decision(result_of(verdict.log_odds), verdict=verdict))
        else:
            decisions.append(Decision(0.5))
    return decisions


def differ(answer: str, other: str) -> bool:
    return answer.strip() != other.strip()


def result_of(difference: float) -> float:
    return 0.5 if difference == 0 else float(difference > 0)
