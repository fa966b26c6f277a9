"""Input and output of `regard chat`.

On a terminal prompt_toolkit edits the input, keeps a history and takes a pasted text as one message, and rich formats
answers as Markdown. Without a terminal every line is a message, and answers are plain text.
"""

import os
import re
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # a model must not send escape sequences to the terminal


class LineTerminal:
    """Plain lines from standard input, plain text to standard output."""

    def __init__(self) -> None:
        self.console, self.notices = Console(highlight=False), Console(stderr=True, highlight=False)

    def read(self) -> str:
        """A line; a backslash at its end continues it on the next one."""
        text = self.read_line()
        while text.endswith("\\"):
            text = text[:-1] + "\n" + self.read_line()
        return text

    def read_line(self) -> str:
        return self.console.input("[bold cyan]you[/]    " if sys.stdin.isatty() else "")

    def notice(self, text: str) -> None:
        self.notices.print(text, style="dim", markup=False, soft_wrap=True)

    @contextmanager
    def answer(self) -> Generator[Callable[[str], None]]:
        self.console.print("[bold green]model[/]  ", end="")

        def show(text: str) -> None:
            print(CONTROL.sub("�", text) if self.console.is_terminal else text, end="", flush=True)

        try:
            yield show
        finally:
            print()


class RichTerminal(LineTerminal):
    """Edited input with a history, and answers as Markdown."""

    def __init__(self, session: "PromptSession[str]"):
        super().__init__()
        self.session = session

    def read(self) -> str:
        return self.session.prompt()

    @contextmanager
    def answer(self) -> Generator[Callable[[str], None]]:
        from rich.live import Live
        from rich.markdown import Markdown

        if not self.console.is_terminal or self.console.no_color:
            with super().answer() as show:
                yield show
            return
        self.console.print("[bold green]model[/]")
        unfinished = ""

        def show(text: str) -> None:
            nonlocal unfinished
            finished, unfinished = split_blocks(unfinished + CONTROL.sub("�", text))
            if finished:
                self.console.print(Markdown(finished))
            live.update(Markdown(unfinished))

        # Only the last block is drawn again with new text: what has scrolled away cannot be.
        with Live(console=self.console, transient=True, refresh_per_second=10) as live:
            try:
                yield show
            finally:
                live.update("")
        self.console.print(Markdown(unfinished))


def split_blocks(text: str) -> tuple[str, str]:
    """The finished Markdown blocks of a text that grows, and the last block.

    A block ends with an empty line before an unindented line, outside a code block.
    """
    ends = [match.end() for match in re.finditer(r"\n\s*\n(?=\S)", text)]
    closed = [end for end in ends if len(re.findall(r"^ {0,3}(?:```|~~~)", text[:end], re.MULTILINE)) % 2 == 0]
    return (text[: closed[-1]], text[closed[-1] :]) if closed else ("", text)


def open_terminal() -> LineTerminal:
    if not sys.stdin.isatty():
        return LineTerminal()
    try:
        return RichTerminal(edited_input(history_file()))
    except ModuleNotFoundError:
        terminal = LineTerminal()
        terminal.notice("For line editing, history and Markdown: pip install 'regard[chat]'")
        return terminal


def history_file() -> Path | None:
    """The file of earlier messages, readable by its owner only; None if it cannot be written."""
    state = os.environ.get("XDG_STATE_HOME", "")
    folder = (Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state") / "regard"
    path = folder / "chat_history"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
        path.chmod(0o600)
    except OSError:
        return None
    return path


def edited_input(history: Path | None, **streams: Any) -> "PromptSession[str]":
    """Input of several lines that Enter submits. `streams` replace the terminal's input and output in tests."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.formatted_text import FormattedText
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings

    from regard.cli.conversation import COMMANDS

    keys = KeyBindings()

    @keys.add("enter")
    def submit(event: Any) -> None:
        buffer = event.current_buffer
        if buffer.document.char_before_cursor == "\\":
            buffer.delete_before_cursor()
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def newline(event: Any) -> None:
        event.current_buffer.newline(copy_margin=False)

    return PromptSession(
        FormattedText([("bold ansicyan", "you    ")]),
        multiline=True,
        prompt_continuation=lambda width, number, wrapped: " " * width,
        key_bindings=keys,
        completer=WordCompleter(list(COMMANDS), sentence=True),
        complete_while_typing=False,
        history=InMemoryHistory() if history is None else FileHistory(str(history)),
        **streams,
    )
