"""A model as judge: which of two answers to a prompt is better.

The judge reads both answers in a question that ends with a request for one letter. Its verdict is the log-odds

    l = log p("A") - log p("B")

of the letters as the first token that it would write; of a model of this package they are exact. Judges prefer one
place to another, so every pair is asked in both orders. With an additive preference b for the answer shown first,

    l(x first) = s + b,   -l(x second) = s - b,   s = (l(x first) - l(x second)) / 2

and the mean s of both is free of it. b itself is reported (Zheng et al. 2023, "Judging LLM-as-a-judge").
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from regard.feedback.prompts import CountDone, shown_prompt
from regard.language_model import LanguageModel
from regard.objectives.chat import answer_ids, answer_messages

LETTERS = ("A", "B")
LIMIT = 30.0  # nats; larger log-odds are clamped, and a letter without probabilities counts as this much
PAIRS = 32  # that are judged before the progress is shown

TEMPLATE = """\
Here are a request and two answers to it, A and B. Which answer is better?

Request:
{prompt}

Answer A:
{first}

Answer B:
{second}

{principles}Reply with one letter, A or B, and nothing else.
"""


class Judge(Protocol):
    def ask(self, questions: Sequence[str]) -> list[float | None]:
        """The log-odds of the letter A against B as the reply to each question; None if the reply is neither."""
        ...


class JudgeVerdict(NamedTuple):
    """The log-odds that the first answer of a pair is better; 0 if the judge did not reply with a letter."""

    shown_first: float  # when it is shown before the other one
    shown_second: float
    unanswered: int = 0  # of the two questions, those whose reply was not a letter

    @property
    def log_odds(self) -> float:
        """The mean of both orders; 0 without the reply to one of them, since the bias of the other does not cancel."""
        return 0.0 if self.unanswered else (self.shown_first + self.shown_second) / 2

    @property
    def preference(self) -> float:
        """The probability that the first answer is better."""
        return 1 / (1 + math.exp(-self.log_odds))

    @property
    def consistent(self) -> bool:
        """Whether both orders have the same verdict."""
        return self.shown_first * self.shown_second > 0

    @property
    def bias(self) -> float:
        """The log-odds that being shown first adds."""
        return (self.shown_first - self.shown_second) / 2


class PositionBias(NamedTuple):
    """Of the pairs that the judge answered in both orders."""

    pairs: int
    chosen_first: float  # the share of questions whose verdict is the answer shown first; 0.5 without a bias
    log_odds: float  # the mean that being shown first adds
    inconsistent: float  # the share of pairs whose verdict depends on the order


def position_bias(verdicts: Sequence[JudgeVerdict]) -> PositionBias | None:
    """None without such pairs."""
    verdicts = [verdict for verdict in verdicts if not verdict.unanswered]
    if not verdicts:
        return None
    shares = [half_if_zero(verdict.shown_first) + half_if_zero(-verdict.shown_second) for verdict in verdicts]
    return PositionBias(
        len(verdicts),
        sum(shares) / (2 * len(verdicts)),
        sum(verdict.bias for verdict in verdicts) / len(verdicts),
        sum(not verdict.consistent for verdict in verdicts) / len(verdicts),
    )


def count_unanswered(verdicts: Sequence[JudgeVerdict]) -> int:
    """The questions whose reply was not a letter."""
    return sum(verdict.unanswered for verdict in verdicts)


def half_if_zero(log_odds: float) -> float:
    return 0.5 if log_odds == 0 else float(log_odds > 0)


def judge_pairs(
    judge: Judge,
    pairs: Sequence[tuple[Any, str, str]],
    template: str = TEMPLATE,
    principles: Sequence[str] = (),
    on_progress: CountDone = lambda done: None,
    answered: bool = False,
) -> list[JudgeVerdict]:
    """The verdicts on pairs (prompt, answer, other answer), each asked in both orders.

    answered: the judge has replied to earlier pairs with a letter. Otherwise, if it does not for the first pairs,
    ValueError is raised.
    """
    verdicts: list[JudgeVerdict] = []
    for start in range(0, len(pairs), PAIRS):
        questions = []
        for prompt, answer, other in pairs[start : start + PAIRS]:
            questions.append(question_of(template, prompt, answer, other, principles))
            questions.append(question_of(template, prompt, other, answer, principles))
        replies = judge.ask(questions)
        verdicts += [verdict_of(first, second) for first, second in zip(replies[::2], replies[1::2], strict=True)]
        if not answered and count_unanswered(verdicts) == 2 * len(verdicts):
            raise ValueError(
                f"the judge replied to none of {2 * len(verdicts)} questions with A or B; take another judge, or ask "
                "for one letter more clearly with `judge` in --constitution"
            )
        on_progress(len(verdicts))
    return verdicts


def verdict_of(first: float | None, second: float | None) -> JudgeVerdict:
    """Of the log-odds of A in both orders."""
    replies = [0.0 if reply is None else reply for reply in (first, second)]
    if any(map(math.isnan, replies)):
        raise ValueError("the judge's log-odds are not a number; its weights may be damaged: check its answers")
    shown_first, shown_second = (max(-LIMIT, min(LIMIT, reply)) for reply in replies)
    return JudgeVerdict(shown_first, -shown_second, (first is None) + (second is None))


def question_of(template: str, prompt: Any, first: str, second: str, principles: Sequence[str]) -> str:
    listed = "".join(f"- {principle}\n" for principle in principles)
    return fill_template(
        template,
        {
            "prompt": shown_prompt(prompt),
            "first": first.strip(),
            "second": second.strip(),
            "principles": f"A better answer follows these principles:\n{listed}\n" if listed else "",
        },
    )


def fill_template(template: str, values: Mapping[str, str]) -> str:
    """In one pass: a {name} inside of a value stays as it is, and so do other braces of the template."""
    names = "|".join(map(re.escape, values))
    return re.sub(rf"\{{({names})\}}", lambda match: values[match[1]], template)


class ModelJudge:
    """A model of this package, with exact log-probabilities of the letters."""

    def __init__(self, llm: LanguageModel):
        self.llm = llm

    def ask(self, questions: Sequence[str]) -> list[float | None]:
        found: list[float | None] = [None] * len(questions)
        prompts = []
        for index, question in enumerate(questions):
            ids, letter, other = self.encode(question)

            def read(tokens: Tensor, logits: Tensor, index: int = index, a: int = letter, b: int = other) -> Tensor:
                found[index] = (logits[a] - logits[b]).item()
                return logits

            prompts.append(self.llm.prompt(ids, (), (), False, {"max_new": 1, "temperature": 0, "processors": (read,)}))
        self.llm.texts.generate(prompts)
        return found

    def encode(self, question: str) -> tuple[list[int], int, int]:
        """The ids before the letter, which may include a start that both replies share, and the ids of A and B."""
        messages = [{"role": "user", "content": question}]
        before = self.llm.encode_chat(messages)
        replies = [answer_ids(before, messages, answer_messages(letter), self.llm.tokenizer) for letter in LETTERS]
        place = next((i for i, (a, b) in enumerate(zip(*replies, strict=False)) if a != b), None)
        if place is None:
            raise ValueError("the chat template of the judge writes the replies A and B with the same tokens")
        return [*before, *replies[0][:place]], replies[0][place], replies[1][place]
