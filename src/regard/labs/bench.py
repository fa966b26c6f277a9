"""The settings of a lab's run: its seed, its size, and a progress bar.

full     the experiment as described; its verdict is the lab's
small    the same models and data with a quarter of the training: a preview of the verdict
quick    sizes that only show that the lab runs; the verdict means nothing
"""

from collections.abc import Iterable, Iterator
from typing import Literal, TypeVar, get_args

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Size = Literal["quick", "small", "full"]
ItemType = TypeVar("ItemType")
AmountType = TypeVar("AmountType", int, float)


class Bench:
    def __init__(self, seed: int = 0, size: Size = "full", console: Console | None = None):
        if size not in get_args(Size):
            raise ValueError(f"size={size!r} is not a size of labs; choose one of {', '.join(get_args(Size))}")
        self.seed, self.size = seed, size
        self.bar = Progress(
            TextColumn("{task.description}"), BarColumn(None), MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"), TimeElapsedColumn(), TimeRemainingColumn(compact=True),
            console=console or Console(quiet=True),
        )  # fmt: skip

    def pick(self, full: ItemType, quick: ItemType) -> ItemType:
        """A setting that is the same in a full and a small run."""
        return quick if self.size == "quick" else full

    def training(self, full: AmountType, quick: AmountType) -> AmountType:
        """An amount of training in steps or seconds: in a small run a quarter of the full one, rounded down."""
        return full // 4 if self.size == "small" else self.pick(full, quick)

    def each(self, label: str, items: Iterable[ItemType]) -> Iterator[ItemType]:
        """The items one by one, with a progress bar."""
        items = list(items)
        task = self.bar.add_task(label, total=len(items), status="")
        for item in items:
            yield item
            self.bar.advance(task)
        self.bar.stop_task(task)

    def show(self, status: str) -> None:
        """Show a status beside the newest bar."""
        self.bar.update(self.bar.task_ids[-1], status=status)
