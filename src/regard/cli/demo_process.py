"""`regard demo` as a process beside a server. It continues if the server ends, and a later server finds it again.

    RUN/output.log      what the process prints. It holds the lock of this file as long as it lives.
    RUN/process.json    its id, which is valid only while output.log is locked

The lock belongs to the open file, which the process inherits as its standard output, so the operating system releases
it when the process ends, however it ends.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from regard.training.run_summary import holds_lock, take_lock

COMMAND = [sys.executable, "-m", "regard", "demo"]
OUTPUT, PROCESS = "output.log", "process.json"
TAIL = 4096  # bytes of the output that are read


class DemoProcesses:
    """Starts and stops `regard demo`. Processes that this object started are its children, and reaped by it."""

    def __init__(self) -> None:
        self.children: list[subprocess.Popen] = []
        self.signalled: dict[Path, int] = {}  # the processes that were asked to end, by their folders

    def start(self, run: Path, steps: int | None = None) -> None:
        """Start or continue the demo in this folder; BlockingIOError if a process runs there."""
        run.mkdir(parents=True, exist_ok=True)
        command = [*COMMAND, "--out", str(run.absolute())]
        command += [] if steps is None else ["--steps", str(steps)]
        with (run / OUTPUT).open("ab") as output:
            take_lock(output)
            output.truncate(0)
            (run / PROCESS).unlink(missing_ok=True)  # the id of an earlier process, which may be another's by now
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in the server's terminal does not reach it
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )
            content = json.dumps({"pid": child.pid, "started": time.time(), "steps": steps})
            (run / PROCESS).write_text(content, encoding="utf-8")
        self.children.append(child)

    def stop(self, run: Path) -> bool:
        """Ask the process to save and end; False if none runs. A second call has no further effect: a second signal
        would abort the process before it saves."""
        pid = self.pid(run)
        if pid is None:
            return False
        if self.signalled.get(run) != pid:
            self.signalled[run] = pid
            os.kill(pid, signal.SIGTERM)
        return True

    def is_stopping(self, run: Path) -> bool:
        return self.pid(run) is not None and run in self.signalled

    def pid(self, run: Path) -> int | None:
        """The process that runs in this folder, if it was started by a server."""
        self.children = [child for child in self.children if child.poll() is None]
        if not holds_lock(run / OUTPUT):
            self.signalled.pop(run, None)
            return None
        try:
            pid = json.loads((run / PROCESS).read_text(encoding="utf-8"))["pid"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return pid if isinstance(pid, int) and pid > 1 else None


def last_lines(run: Path, count: int = 6) -> list[str]:
    """The end of the output of the process."""
    try:
        with (run / OUTPUT).open("rb") as stream:
            stream.seek(max(0, stream.seek(0, 2) - TAIL))
            text = stream.read(TAIL).decode("utf-8", "replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-count:]
