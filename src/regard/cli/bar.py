"""A bar for weights that stream in: how many, how fast, how long it will take."""

from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def bar(console: Console, what: str) -> Generator[Callable[[int, int], None]]:
    """What is yielded is told how many there are, and of how many; the bar goes when all are. No terminal, no bar."""
    words = TextColumn("{task.percentage:3.0f}% {task.fields[rate]}")
    with Progress(
        TextColumn("{task.description}"), BarColumn(), words, TimeRemainingColumn(compact=True),
        console=console, transient=True, disable=not console.is_terminal,
    ) as shown:  # fmt: skip
        task = shown.add_task(what, total=None, rate="")

        def tell(done: int, total: int) -> None:
            speed = shown.tasks[0].speed
            shown.update(task, completed=done, total=total, rate=f"{speed / 1e6:,.0f} M/s" if speed else "")

        yield tell
