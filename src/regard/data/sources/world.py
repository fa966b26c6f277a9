"""Examples of the simulated world (regard/data/world), endless and with known answers, for every kind of training."""

from dataclasses import dataclass

from regard.data.sources.base import DataSource, Example, Generated, Splits
from regard.data.spans import Span
from regard.data.world import LEVELS, Story, story
from regard.data.world.tasks import TASKS, example
from regard.spec import require, suggest_name
from regard.text.chat import ASSISTANT, END, USER


@dataclass(frozen=True)
class WorldStories(DataSource):
    """By default conversations: a story, then questions and answers in turns; documents are the same as plain text.

    The next event of a story is random. A model trained equally on all tokens spends its capacity on predicting events
    long before it learns to retrieve facts. Answers therefore have weight 1, story and questions less.
    """

    level: int = 1  # difficulty
    task: str = "chat"  # regard/data/world/tasks.py: translation, pairs, event_kind, yes_no, entities …
    story_weight: float = 0.1  # loss weight of the story in a conversation or document
    question_weight: float = 0.0  # loss weight of the questions in a conversation or document

    def check(self) -> None:
        super().check()
        require(
            self.level in LEVELS,
            f"world: level={self.level} is not a level; choose one of {', '.join(map(str, LEVELS))}",
        )
        require(self.task in TASKS, f"world: task={self.task!r} is not a task; {suggest_name(self.task, list(TASKS))}")

    def open(self, seed: int = 0, hold_out: bool = True) -> Splits:
        def generated(split: str) -> Generated:
            task = "world" if self.task == "chat" else f"world {self.task}"
            name = f"{task} level {self.level}, {split}, seed {seed}"
            return Generated(name, lambda index: self.example((seed << 40) + index, split))

        return Splits(generated("train"), generated("held-out") if hold_out else None)

    def example(self, seed: int, split: str) -> Example:
        if self.task == "chat":
            return self.conversation(story(seed, self.level, split))
        if self.task == "document":
            return self.document(story(seed, self.level, split))
        return example(self.task, seed, self.level, split)

    def conversation(self, story: Story) -> Example:
        spans = [Span(USER, 0.0, special=True), Span(f" {story.text}", self.story_weight)]
        for number, question in enumerate(story.questions):
            if number:
                spans.append(Span(USER, 0.0, special=True))
            spans += [
                Span(f" {question.text}", self.question_weight),
                Span(ASSISTANT, 0.0, special=True),
                Span(f" {question.answer}"),
                Span(END, special=True),
            ]
        return {"spans": tuple(spans)}

    def document(self, story: Story) -> Example:
        spans = [Span(story.text, self.story_weight)]
        for question in story.questions:
            spans += [Span(f" {question.text}", self.question_weight), Span(f" {question.answer}.")]
        return {"spans": (*spans, Span(END, special=True))}
