"""A JSON Lines file that a process appends to, and that is continued after an interruption.

Every line is written at once and flushed, so a killed process leaves complete lines and perhaps a torn last one, which
is removed when the file is opened again. A last line that does not start like a line of this file is refused and stays:
it is of another writer. The file is locked while it is open.
"""

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class AppendedLines:
    def __init__(self, path: Path):
        self.path, self.created = path, not path.exists()
        self.stream = path.open("ab+")
        try:
            fcntl.flock(self.stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.stream.close()
            raise ValueError(f"another process is writing {path}; wait for it, or choose another file") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if kind is not None and self.created and not os.fstat(self.stream.fileno()).st_size:
            self.path.unlink(missing_ok=True)  # nothing was written before the failure
        self.stream.close()

    def entries(self, starts: Iterable[bytes]) -> Iterator[tuple[int, Any]]:
        """The number and the value of each line, None if it is not JSON; then a torn line is removed.

        starts: the first bytes that lines of this file may have. A torn line without them raises ValueError.
        """
        end = 0
        self.stream.seek(0)
        for number, line in enumerate(self.stream, 1):
            value = parse_json(line)
            complete = line.endswith(b"\n")
            if not complete and value is None:  # written while the process was killed
                if not any(line.startswith(start) or start.startswith(line) for start in starts):
                    raise ValueError(
                        f"{self.path}, line {number}: not written by this command; choose another output file"
                    )
                self.stream.truncate(end)
                return
            yield number, value
            if not complete:  # only the end of the line is missing
                self.stream.write(b"\n")
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
