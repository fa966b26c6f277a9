"""Answers of an assistant: their form, mistakes, and examples for alignment with rewards that can be checked.

    plain       the museum                  correct, in the form of the questions' own answers
    preferred   Answer: the museum.         correct, in the form that is preferred

An assistant that was trained on both forms uses either. Preferences teach it the preferred form and correct content: of
each pair the chosen answer has both, and the rejected one lacks one of them.
"""

import re
from itertools import count
from random import Random
from typing import Any, NamedTuple

from regard.data.world import Question, Story, story

FORM = re.compile(r"Answer: (.*)\.")
NEXT_STORY = 1 << 32  # beyond the seeds of one source, whose stories are numbered


def in_preferred_form(answer: str) -> str:
    return f"Answer: {answer}."


class AnswerGrade(NamedTuple):
    correct: bool  # the content, in either form
    formatted: bool  # the preferred form

    @property
    def score(self) -> float:
        """1 for correct content, and ½ more for the preferred form; the form alone is worth ¼."""
        return (1.0 + 0.5 * self.formatted) if self.correct else 0.25 * self.formatted


def grade(completion: str, answer: str) -> AnswerGrade:
    match = FORM.fullmatch(completion.strip())
    return AnswerGrade((match[1] if match else completion.strip()) == answer, match is not None)


def score_answers(
    prompts: list[Any], completions: list[list[dict[str, str]]], answer: list[str], **columns: Any
) -> list[float]:
    """A reward function for reinforcement learning: the score of each completion, a list with one message."""
    texts = (message["content"] for (message,) in completions)
    return [grade(text, right).score for text, right in zip(texts, answer, strict=True)]


def correct_in_form(
    prompts: list[Any], completions: list[list[dict[str, str]]], answer: list[str], **columns: Any
) -> list[float]:
    """A reward function: 1 for correct content in the preferred form, else 0."""
    texts = (message["content"] for (message,) in completions)
    return [float(all(grade(text, right))) for text, right in zip(texts, answer, strict=True)]


def ask(seed: int, level: int, split: str) -> dict[str, Any]:
    """A story with a question as a prompt, and the plain `answer`."""
    tale, asked = draw_question(seed, level, split)
    return {"prompt": prompt_of(tale, asked), "answer": asked.answer}


def instructions(seed: int, level: int, split: str) -> dict[str, Any]:
    """A conversation with one question; half of the answers have the preferred form."""
    tale, asked = draw_question(seed, level, split)
    form = Random(f"form/{level}/{seed}").choice((str, in_preferred_form))
    return {"messages": [*prompt_of(tale, asked), {"role": "assistant", "content": form(asked.answer)}]}


def preference(seed: int, level: int, split: str) -> dict[str, Any]:
    """A prompt with a chosen answer, and a rejected one that is wrong or plain."""
    tale, asked = draw_question(seed, level, split)
    rng = Random(f"preference/{level}/{seed}")
    wrong = in_preferred_form(wrong_answer(tale, asked, seed, level, split, rng))
    rejected = wrong if rng.random() < 0.5 else asked.answer
    return {"prompt": prompt_of(tale, asked), "chosen": in_preferred_form(asked.answer), "rejected": rejected}


def feedback(seed: int, level: int, split: str) -> dict[str, Any]:
    """A prompt with one answer and whether it is good: the chosen or the rejected one of a preference."""
    pair = preference(seed, level, split)
    good = Random(f"feedback/{level}/{seed}").random() < 0.5
    return {"prompt": pair["prompt"], "completion": pair["chosen" if good else "rejected"], "label": good}


def draw_question(seed: int, level: int, split: str) -> tuple[Story, Question]:
    tale = story(seed, level, split)
    return tale, tale.questions[seed % len(tale.questions)]


def prompt_of(tale: Story, asked: Question) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{tale.text} {asked.text}"}]


def wrong_answer(tale: Story, asked: Question, seed: int, level: int, split: str, rng: Random) -> str:
    """An answer to a question of the same kind: about this story if there is another one, else about a later story."""
    for number in count(1):
        answers = {other.answer for other in tale.questions if other.kind == asked.kind} - {asked.answer}
        if answers:
            return rng.choice(sorted(answers))
        tale = story(seed + number * NEXT_STORY, level, split)
    raise AssertionError("unreachable: stories are endless")
