"""Exact match on the small world: held-out stories, one question each, answered greedily; only the whole answer counts.

The model is asked as a user of the chat API would ask it, so what is measured is what is served.
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
    said: str

    @property
    def correct(self) -> bool:
        return self.said == self.question.answer


def examine(
    engine: Engine,
    tokenizer: Tokenizer,
    count: int,
    level: int = 1,
    first: int = 0,
    told: Callable[[int], None] = lambda n: None,
) -> list[GradedAnswer]:
    """Ask `count` questions about as many held-out stories; `told` hears how many answers there are."""
    asked, requests = [], []
    for number in range(first, first + count):
        tale = story(number, level, "held-out")
        question = tale.questions[number % len(tale.questions)]
        ids = encode_chat(tokenizer, [{"role": "user", "content": f"{tale.text} {question.text}"}])
        asked.append((tale, question))
        requests.append((ids, Sampling(max_new=24, temperature=0, stop_ids=tokenizer.stop_ids)))
    answers: list[GradedAnswer] = []
    for start in range(0, count, engine.store.rows):
        batch = [engine.submit(*request) for request in requests[start : start + engine.store.rows]]
        while not engine.idle:
            engine.step()
        for request, (tale, question) in zip(batch, asked[start:], strict=False):
            said = [token.id for token in request.new if token.finish != "stop"]
            answers.append(GradedAnswer(tale, question, tokenizer.decode(said).strip()))
        told(len(answers))
    return answers


def exact_match(answers: list[GradedAnswer]) -> float:
    return sum(answer.correct for answer in answers) / len(answers)


def by_kind(answers: list[GradedAnswer]) -> dict[str, tuple[int, int]]:
    """(correct, asked) for every kind of question."""
    kinds = sorted({answer.question.kind for answer in answers})
    return {
        kind: (
            sum(a.correct for a in answers if a.question.kind == kind),
            sum(a.question.kind == kind for a in answers),
        )
        for kind in kinds
    }
