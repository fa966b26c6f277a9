"""A JSON Lines file that a process appends to, and that is continued after an interruption.

Every line is written at once and flushed, so a killed process leaves complete lines and perhaps a torn last one, which
is removed when the file is opened again. The file is locked while it is open.
"""

import fcntl
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class AppendedLines:
    def __init__(self, path: Path):
        self.path = path
        self.stream = path.open("ab+")
        try:
            fcntl.flock(self.stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.stream.close()
            raise ValueError(f"another process is writing {path}; wait for it, or choose another file") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.stream.close()

    def entries(self) -> Iterator[tuple[int, Any]]:
        """The number and the value of each complete line, None if it is not JSON; then a torn line is removed."""
        end = 0
        self.stream.seek(0)
        for number, line in enumerate(self.stream, 1):
            if not line.endswith(b"\n"):
                self.stream.truncate(end)  # written while the process was killed
                return
            yield number, parse_json(line)
            end += len(line)

    def append(self, entry: Mapping[str, Any]) -> None:
        self.stream.write((json.dumps(entry) + "\n").encode())
        self.stream.flush()  # a killed process loses at most the line that it is writing


def parse_json(line: bytes) -> Any:
    """The value of a JSON line, or None."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
