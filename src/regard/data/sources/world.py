"""Stories of the simulated world (regard/data/world), endless and with known answers."""

from dataclasses import dataclass

from regard.data.sources.base import DataSource, Example, Generated, Splits
from regard.data.spans import Span
from regard.data.world import LEVELS, Story, story
from regard.spec import require
from regard.text.chat import ASSISTANT, END, USER


@dataclass(frozen=True)
class WorldStories(DataSource):
    """Conversations: a story, then questions and answers in turns.

    The next event of a story is random. A model trained equally on all tokens spends its capacity on predicting events
    long before it learns to retrieve facts. Answers therefore have weight 1, story and questions less.
    """

    level: int = 1  # difficulty
    story_weight: float = 0.1  # loss weight of the story
    question_weight: float = 0.0  # loss weight of the questions

    def check(self) -> None:
        super().check()
        require(
            self.level in LEVELS,
            f"world: level={self.level} is not a level; choose one of {', '.join(map(str, LEVELS))}",
        )

    def open(self, seed: int = 0, hold_out: bool = True) -> Splits:
        def generated(split: str) -> Generated:
            name = f"world level {self.level}, {split}, seed {seed}"
            return Generated(name, lambda index: self.conversation(story((seed << 40) + index, self.level, split)))

        return Splits(generated("train"), generated("held-out") if hold_out else None)

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
