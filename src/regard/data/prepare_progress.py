"""Progress of `prepare`: a bar in a terminal, plain lines elsewhere."""

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from regard.data.prepare import PreparationListener
from regard.data.shards import ShardedExamples

LINE_SECONDS = 10.0


class PreparationProgress(PreparationListener):
    """Examples, tokens per second and remaining time."""

    def __init__(self, console: Console | None = None):
        self.console = console or Console(stderr=True)
        columns = [TextColumn("preparing"), BarColumn(None), MofNCompleteColumn(), TextColumn("{task.fields[status]}")]
        self.bar = Progress(*columns, TimeRemainingColumn(compact=True), console=self.console, refresh_per_second=4)
        self.tokens, self.written = 0, 0

    def started(self, done: int, total: int) -> None:
        self.start = self.last_line = time.monotonic()
        self.done, self.total = done, total
        if done:
            self.note(f"{done:,} of {total:,} examples were already prepared and are kept")
        self.task = self.bar.add_task("", total=total, completed=done, status="")
        if self.console.is_terminal:
            self.bar.start()

    def advanced(self, examples: int, tokens: int) -> None:
        self.tokens, self.written = self.tokens + tokens, self.written + examples
        status = f"{self.rate:,.0f} tokens/s"
        self.bar.update(self.task, completed=self.done + self.written, status=status)
        if not self.console.is_terminal and time.monotonic() - self.last_line > LINE_SECONDS:
            self.last_line = time.monotonic()
            self.note(f"{self.done + self.written:,}/{self.total:,} examples  {status}")

    def note(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def ended(self) -> None:
        self.seconds = time.monotonic() - self.start
        if self.console.is_terminal:
            self.bar.stop()

    @property
    def rate(self) -> float:
        """Tokens per second since the start."""
        return self.tokens / max(1e-9, time.monotonic() - self.start)

    def summary(self, prepared: ShardedExamples) -> str:
        """The result in one or two lines; call it after `prepare`."""
        shards, megabytes = len(prepared.shards), prepared.bytes / 1e6
        size = f"{len(prepared):,} examples, {prepared.tokens:,} tokens, {shards} shards, {megabytes:,.1f} MB"
        if not self.written:
            return f"{prepared.folder}: {size}; it was already prepared, and all checksums are right"
        rate = self.tokens / max(self.seconds, 1e-9)
        return f"{prepared.folder}: {size}\n{self.tokens:,} tokens in {self.seconds:,.1f} s, {rate:,.0f} tokens/s"
