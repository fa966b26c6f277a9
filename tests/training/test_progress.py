"""Progress: a bar in a terminal, lines elsewhere."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from regard.training.progress import Bar, Lines, format_duration, progress_listener
from tests.training.tiny import trainer


def printed(path: Path, terminal: bool) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=120, color_system=None)
    trainer(path, listener=progress_listener(console)).train()
    return console.file.getvalue()


def test_the_listener_depends_on_the_console() -> None:
    assert isinstance(progress_listener(Console(file=io.StringIO(), force_terminal=True)), Bar)
    assert isinstance(progress_listener(Console(file=io.StringIO())), Lines)


def test_a_terminal_shows_a_bar(tmp_path: Path) -> None:
    text = printed(tmp_path, terminal=True)
    for part in ("training", "10/10", "loss ", "tokens/s", "step 5  held out: loss"):
        assert part in text


def test_other_outputs_get_lines(tmp_path: Path) -> None:
    lines = printed(tmp_path, terminal=False).splitlines()
    assert lines[0].startswith("step 1/10  loss ") and lines[0].endswith(" left")
    assert lines[1].startswith("step 5  held out: loss ")
    assert lines[2].startswith("step 10/10  loss ") and "0:00 left" in lines[2]
    assert len(lines) == 4


def test_a_skipped_step_is_shown() -> None:
    console = Console(file=io.StringIO())
    lines = Lines(console)
    lines.started(0, 1)
    lines.stepped({"step": 1, "loss": None, "tokens_per_second": 10.0, "seconds": 1.0})
    assert "loss skipped" in console.file.getvalue()


@pytest.mark.parametrize(("seconds", "text"), [(5, "0:05"), (65, "1:05"), (3665, "1:01:05"), (59.7, "1:00")])
def test_seconds_are_formatted_as_clock_time(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
