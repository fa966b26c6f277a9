"""Critique and revision: a model corrects its own answers by written principles. Bai et al. 2022, "Constitutional AI".

    prompt ─> answer ─> critique by a principle ─> revision ─> (the next round, with the revision as the answer)

Each round is a conversation of its own: the prompt, the last answer, the request for a critique, the critique, the
request for a revision. The result is a conversation of the prompt with the last revision, for supervised fine-tuning
(`regard tune sft`); the first answer and all rounds are kept beside it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from regard.feedback.constitution import Constitution
from regard.feedback.prompts import GenerateAnswers, MessageList, as_messages


class Round(NamedTuple):
    principle: str  # its name
    critique: str
    revision: str


class Revision(NamedTuple):
    prompt: MessageList
    initial: str
    rounds: tuple[Round, ...]

    @property
    def final(self) -> str:
        return self.rounds[-1].revision

    def as_line(self) -> dict[str, Any]:
        """`messages` to train on, and how they came about."""
        return {
            "messages": [*self.prompt, {"role": "assistant", "content": self.final}],
            "initial": self.initial,
            "rounds": [turn._asdict() for turn in self.rounds],
        }


def revise(
    answer: GenerateAnswers,
    prompts: Sequence[Any],
    numbers: Sequence[int],
    constitution: Constitution,
    rounds: int = 1,
    seed: int = 0,
) -> list[Revision]:
    """The revisions of the answers to prompts. numbers: of the prompts; principles and seeds follow from them."""
    conversations = [as_messages(prompt) for prompt in prompts]
    drawn = [constitution.draw(seed, number, rounds) for number in numbers]
    calls = 1 + 2 * rounds  # per prompt

    def ask(requests: Sequence[MessageList], call: int) -> list[str]:
        return [text.strip() for text in answer(requests, [number * calls + call for number in numbers])]

    initial = answers = ask(conversations, 0)
    done: list[list[Round]] = [[] for _ in prompts]
    for turn in range(rounds):
        principles = [chosen[turn] for chosen in drawn]
        requests = [
            [*prompt, assistant(text), user(constitution.critique_request(principle))]
            for prompt, text, principle in zip(conversations, answers, principles, strict=True)
        ]
        critiques = ask(requests, 1 + 2 * turn)
        requests = [
            [*request, assistant(critique), user(constitution.revision_request(principle))]
            for request, critique, principle in zip(requests, critiques, principles, strict=True)
        ]
        answers = ask(requests, 2 + 2 * turn)
        for turns, principle, critique, text in zip(done, principles, critiques, answers, strict=True):
            turns.append(Round(principle.name, critique, text))
    return [
        Revision(prompt, first, tuple(turns)) for prompt, first, turns in zip(conversations, initial, done, strict=True)
    ]


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}
