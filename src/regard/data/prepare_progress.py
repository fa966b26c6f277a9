"""Progress of `prepare`: a bar in a terminal, plain lines elsewhere."""

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from regard.data.prepare import PreparationListener

LINE_SECONDS = 10.0


class PreparationProgress(PreparationListener):
    """Examples, tokens per second and remaining time."""

    def __init__(self, console: Console | None = None):
        self.console = console or Console(stderr=True)
        columns = [TextColumn("preparing"), BarColumn(None), MofNCompleteColumn(), TextColumn("{task.fields[status]}")]
        self.columns = [*columns, TimeRemainingColumn(compact=True)]
        self.tokens, self.written, self.seconds = 0, 0, 0.0  # of all calls

    def started(self, done: int, total: int) -> None:
        self.start = self.last_line = time.monotonic()
        self.completed, self.total, self.new_tokens = done, total, 0
        self.bar = Progress(*self.columns, console=self.console, refresh_per_second=4)
        if done:
            self.note(f"{done:,} of {total:,} examples were already prepared and are kept")
        self.task = self.bar.add_task("", total=total, completed=done, status="")
        if self.console.is_terminal:
            self.bar.start()

    def advanced(self, examples: int, tokens: int) -> None:
        self.tokens, self.written = self.tokens + tokens, self.written + examples
        self.completed, self.new_tokens = self.completed + examples, self.new_tokens + tokens
        now = time.monotonic()
        status = f"{self.new_tokens / max(1e-9, now - self.start):,.0f} tokens/s"
        self.bar.update(self.task, completed=self.completed, status=status)
        if not self.console.is_terminal and now - self.last_line > LINE_SECONDS:
            self.last_line = now
            self.note(f"{self.completed:,}/{self.total:,} examples  {status}")

    def note(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def ended(self) -> None:
        self.seconds += time.monotonic() - self.start
        if self.console.is_terminal:
            self.bar.stop()

    def summary(self) -> str:
        """The work of all calls, in one line."""
        if not self.written:
            return "everything was prepared already, and all checksums are right"
        return f"{self.tokens:,} tokens in {self.seconds:,.1f} s, {self.tokens / max(self.seconds, 1e-9):,.0f} tokens/s"
