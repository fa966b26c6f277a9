"""Preference pairs labelled by a judge (RLAIF: Bai et al. 2022, Lee et al. 2023).

The model samples two answers to a prompt, and a judge decides in both orders which is better. The pairs are those of
`regard tune dpo` and `regard tune reward`. A verdict that changes with the order of the answers is no evidence: such
pairs are dropped, or labelled by the mean of both orders.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from regard.feedback.comparison import differ
from regard.feedback.judge import TEMPLATE, Judge, JudgeVerdict, judge_pairs
from regard.feedback.prompts import GenerateAnswers

INCONSISTENT = ("drop", "average")


@dataclass
class Labeller:
    """Makes the lines of labelled pairs, and counts what it has dropped."""

    answer: GenerateAnswers
    judge: Judge
    template: str = TEMPLATE
    principles: Sequence[str] = ()
    inconsistent: str = "drop"
    answered: bool = False  # whether the judge has replied with a letter; True for a file that is continued
    equal: int = 0  # prompts whose two answers are equal
    dropped: int = 0  # pairs whose verdict depends on the order, or is none
    verdicts: list[JudgeVerdict] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.inconsistent not in INCONSISTENT:
            raise ValueError(f"inconsistent={self.inconsistent!r} must be one of {', '.join(INCONSISTENT)}")

    def __call__(self, prompts: Sequence[Any], numbers: Sequence[int]) -> list[dict[str, Any] | None]:
        twice = [prompt for prompt in prompts for _ in range(2)]
        answers = self.answer(twice, [2 * number + side for number in numbers for side in range(2)])
        pairs = list(zip(prompts, answers[::2], answers[1::2], strict=True))
        differing = [pair for pair in pairs if differ(*pair[1:])]
        verdicts = judge_pairs(self.judge, differing, self.template, self.principles, answered=self.answered)
        self.answered |= bool(verdicts)
        self.verdicts += verdicts
        self.equal += len(pairs) - len(differing)
        waiting = iter(verdicts)
        return [self.line(*pair, next(waiting)) if differ(*pair[1:]) else None for pair in pairs]

    def line(self, prompt: Any, answer: str, other: str, verdict: JudgeVerdict) -> dict[str, Any] | None:
        keep = verdict.consistent if self.inconsistent == "drop" else verdict.log_odds != 0
        if not keep:
            self.dropped += 1
            return None
        if not isinstance(prompt, str):  # the chat template writes the space before an answer
            answer, other = answer.strip(), other.strip()
        chosen, rejected = (answer, other) if verdict.log_odds > 0 else (other, answer)
        return {
            "prompt": prompt,
            "chosen": chosen,
            "rejected": rejected,
            "preference": max(verdict.preference, 1 - verdict.preference),
            "consistent": verdict.consistent,
        }
