"""The answers of an assistant to questions about held-out stories of the world: content, form, and win rate.

The prompts are those of the task `question`, answered greedily. Of two answers to one prompt, the one wins that has the
larger score (data/world/answers.py).
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from regard.data.world.answers import AnswerGrade, grade
from regard.data.world.tasks import example
from regard.engine.engine import Engine
from regard.engine.request import Sampling
from regard.text.chat import encode_chat
from regard.text.tokenizer import Tokenizer

FIRST = 1 << 50  # seeds of stories that no training run reaches
Z = 1.96  # of a 95 % interval


def grade_assistant(
    engine: Engine,
    tokenizer: Tokenizer,
    count: int,
    level: int = 1,
    on_progress: Callable[[int], None] = lambda done: None,
) -> list[AnswerGrade]:
    """The grades of the answers to `count` questions; `on_progress` is called with their number after every batch."""
    sampling = Sampling(max_new=24, temperature=0, stop_ids=tokenizer.stop_ids)
    questions = [example("question", FIRST + number, level, "held-out") for number in range(count)]
    grades: list[AnswerGrade] = []
    for start in range(0, count, engine.store.rows):
        batch = questions[start : start + engine.store.rows]
        requests = [engine.submit(encode_chat(tokenizer, question["prompt"]), sampling) for question in batch]
        while not engine.idle:
            engine.step()
        for question, request in zip(batch, requests, strict=True):
            ids = [token.id for token in request.new if token.finish != "stop"]
            grades.append(grade(tokenizer.decode(ids), question["answer"]))
        on_progress(len(grades))
    return grades


class Estimate(NamedTuple):
    """A mean with half the width of its 95 % interval."""

    mean: float
    error: float


def estimate(values: Sequence[float]) -> Estimate:
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / max(1, len(values) - 1)
    return Estimate(mean, Z * math.sqrt(variance / len(values)))


def win_rate(grades: Sequence[AnswerGrade], others: Sequence[AnswerGrade]) -> Estimate:
    """The share of prompts whose answer has the larger score; ties count half."""
    scores = [(a.score, b.score) for a, b in zip(grades, others, strict=True)]
    return estimate([1.0 if a > b else 0.5 if a == b else 0.0 for a, b in scores])
