"""How much of its context a model uses: tasks of long texts (regard/data/world/long_texts.py) by length and depth.

The effective length is the largest up to which a model keeps KEPT of its accuracy at the shortest length, over all
tasks; a model that answers fewer than LEAST of the questions at the shortest length has none. An output is correct if
the first of the possible answers that it names is the right one.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from regard.data.world.long_texts import LONG_TASKS, LongQuestion, long_question

KEPT, LEAST = 0.85, 0.5
WITHOUT_DEPTH = ("count",)
Answers = Callable[[Sequence[LongQuestion]], Sequence[str]]


@dataclass(frozen=True)
class LongCell:
    task: str
    length: int  # tokens of the prompt, at most
    depth: float | None  # None: the task has none
    correct: int
    asked: int

    @property
    def accuracy(self) -> float:
        return self.correct / self.asked


@dataclass(frozen=True)
class LongReport:
    cells: tuple[LongCell, ...]

    def select(self, **values: Any) -> list[LongCell]:
        """The cells with these values of `task`, `length` or `depth`."""
        return [cell for cell in self.cells if all(getattr(cell, name) == value for name, value in values.items())]

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(cell.task for cell in self.cells))

    @property
    def lengths(self) -> list[int]:
        return sorted({cell.length for cell in self.cells})

    def depths(self, task: str) -> list[float | None]:
        return list(dict.fromkeys(cell.depth for cell in self.select(task=task)))

    def accuracy(self, length: int, task: str | None = None) -> float:
        """Of a task; by default the mean over the tasks."""
        tasks = self.tasks if task is None else [task]
        return sum(share(self.select(task=each, length=length)) for each in tasks) / len(tasks)

    @property
    def effective_length(self) -> int | None:
        shortest, effective = self.accuracy(self.lengths[0]), self.lengths[0]
        if shortest < LEAST:
            return None
        for length in self.lengths:
            if self.accuracy(length) < KEPT * shortest:
                break
            effective = length
        return effective

    @property
    def verdict(self) -> str:
        """The effective length in words."""
        accuracy, shortest = self.accuracy(self.lengths[0]), self.lengths[0]
        if self.effective_length is None:
            return (
                f"no effective length: {accuracy:.0%} of the answers are correct at {shortest:,} tokens already, fewer "
                f"than {LEAST:.0%}"
            )
        if len(self.lengths) == 1:
            return (
                f"one length has no effective length: {accuracy:.0%} of the answers are correct at {shortest:,} tokens"
            )
        return (
            f"effective length: {self.effective_length:,} tokens; up to it, the model keeps {KEPT:.0%} of its accuracy "
            f"at {shortest:,} tokens ({accuracy:.0%})"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "effective_length": self.effective_length,
            "accuracy": {str(length): self.accuracy(length) for length in self.lengths},
            "cells": [asdict(cell) for cell in self.cells],
        }


def share(cells: Sequence[LongCell]) -> float:
    return sum(cell.correct for cell in cells) / sum(cell.asked for cell in cells)


def measure_context(
    answers: Answers,
    count_tokens: Callable[[str], int],
    lengths: Iterable[int],
    depths: Sequence[float],
    tasks: Sequence[str] = tuple(LONG_TASKS),
    count: int = 8,
    seed: int = 0,
    margin: int = 0,
    on_progress: Callable[[int], None] = lambda asked: None,
) -> LongReport:
    """count: questions per cell. margin: tokens of a prompt beside its text. on_progress: the number of questions that
    were answered, after each cell."""
    cells: list[LongCell] = []
    for length in lengths:
        for task in tasks:
            for depth in [None] if task in WITHOUT_DEPTH else depths:
                first = seed * 1_000_003
                questions = [
                    long_question(task, number, length - margin, depth or 0.0, count_tokens)
                    for number in range(first, first + count)
                ]
                outputs = answers(questions)
                correct = sum(
                    each.named(output) == each.answer for each, output in zip(questions, outputs, strict=True)
                )
                cells.append(LongCell(task, length, depth, correct, count))
                on_progress(count)
    return LongReport(tuple(cells))
