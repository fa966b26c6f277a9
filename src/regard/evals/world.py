"""Exact match on the small world: one question about each held-out story, answered greedily.

The prompt is written by the chat template, as the server does it. An answer is correct only as a whole.
"""

from collections.abc import Callable
from dataclasses import dataclass

from regard.data.world import Question, Story, story
from regard.engine.engine import Engine
from regard.engine.request import Sampling
from regard.evals.generation import run_in_batches
from regard.text.chat import encode_chat
from regard.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class GradedAnswer:
    story: Story
    question: Question
    answer: str  # the model's

    @property
    def correct(self) -> bool:
        return self.answer == self.question.answer


def answer_questions(
    engine: Engine,
    tokenizer: Tokenizer,
    count: int,
    level: int = 1,
    on_progress: Callable[[int], None] = lambda done: None,
) -> list[GradedAnswer]:
    """Answer one question about each of `count` held-out stories.

    `on_progress` is called with the number of answers after every batch.
    """
    sampling = Sampling(max_new=24, temperature=0, stop_ids=tokenizer.stop_ids)
    stories = [story(number, level, "held-out") for number in range(count)]
    asked = [each.questions[number % len(each.questions)] for number, each in enumerate(stories)]
    prompts = [
        (encode_chat(tokenizer, [{"role": "user", "content": f"{each.text} {question.text}"}]), None)
        for each, question in zip(stories, asked, strict=True)
    ]
    requests = run_in_batches(engine, prompts, sampling, on_progress)
    return [
        GradedAnswer(each, question, tokenizer.decode(request.output_ids).strip())
        for each, question, request in zip(stories, asked, requests, strict=True)
    ]


def share_correct(answers: list[GradedAnswer]) -> float:
    return sum(answer.correct for answer in answers) / len(answers)


def counts_by_kind(answers: list[GradedAnswer]) -> dict[str, tuple[int, int]]:
    """(correct, asked) per kind of question."""
    kinds = sorted({answer.question.kind for answer in answers})
    return {
        kind: (
            sum(a.correct for a in answers if a.question.kind == kind),
            sum(a.question.kind == kind for a in answers),
        )
        for kind in kinds
    }
