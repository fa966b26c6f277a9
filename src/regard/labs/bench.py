"""The bench that a lab works on: its seed, how thorough it may be, and a bar that shows how far it is."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

ChoiceType = TypeVar("ChoiceType")


class Bench:
    def __init__(self, seed: int = 0, quick: bool = False, console: Console | None = None):
        self.seed, self.quick = seed, quick
        self.bar = Progress(
            TextColumn("{task.description}"), BarColumn(None), MofNCompleteColumn(), TextColumn("{task.fields[told]}"),
            TimeElapsedColumn(), TimeRemainingColumn(compact=True), console=console or Console(quiet=True),
        )  # fmt: skip

    def pick(self, thorough: ChoiceType, quick: ChoiceType) -> ChoiceType:
        """A size: the one whose findings mean something, or the one that only shows that the lab runs."""
        return quick if self.quick else thorough

    def each(self, what: str, items: Iterable[ChoiceType]) -> Iterator[ChoiceType]:
        """The items, one after another, with a bar."""
        items = list(items)
        task = self.bar.add_task(what, total=len(items), told="")
        for item in items:
            yield item
            self.bar.advance(task)
        self.bar.stop_task(task)

    def tell(self, told: str) -> None:
        """A word beside the newest bar."""
        self.bar.update(self.bar.task_ids[-1], told=told)
