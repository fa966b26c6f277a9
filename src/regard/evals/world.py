"""Exact match on the small world: one question about each held-out story, answered greedily.

The prompt is written by the chat template, as the server does it. An answer is correct only as a whole.
"""

from collections.abc import Callable
from dataclasses import dataclass

from regard.data.world import Question, Story, story
from regard.engine.engine import Engine
from regard.engine.request import Sampling
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
    first: int = 0,
    on_progress: Callable[[int], None] = lambda done: None,
) -> list[GradedAnswer]:
    """Answer one question about each of `count` held-out stories, from story number `first` on.

    `on_progress` is called with the number of answers after every batch.
    """
    sampling = Sampling(max_new=24, temperature=0, stop_ids=tokenizer.stop_ids)
    answers: list[GradedAnswer] = []
    for start in range(first, first + count, engine.store.rows):
        batch = []
        for number in range(start, min(start + engine.store.rows, first + count)):
            held_out = story(number, level, "held-out")
            question = held_out.questions[number % len(held_out.questions)]
            prompt = encode_chat(tokenizer, [{"role": "user", "content": f"{held_out.text} {question.text}"}])
            batch.append((held_out, question, engine.submit(prompt, sampling)))
        while not engine.idle:
            engine.step()
        for held_out, question, request in batch:
            ids = [token.id for token in request.new if token.finish != "stop"]
            answers.append(GradedAnswer(held_out, question, tokenizer.decode(ids).strip()))
        on_progress(len(answers))
    return answers


def exact_match(answers: list[GradedAnswer]) -> float:
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
