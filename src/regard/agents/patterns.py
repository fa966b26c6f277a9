"""Matches the patterns of schemas that other programs wrote, within a time limit.

Python's `re` backtracks: `(a+)+$` takes exponential time, and nothing but the end of the process stops it. So patterns
that have more than one repetition or alternative, and long texts, are matched in a child process.
"""

import json
import re
import select
import subprocess
import sys
import time

SECONDS = 5.0  # for all matches in the child process, its start included
BACKTRACKS = re.compile(r"[*+?{|]|\\\d")  # with only one of these the time is at most quadratic
SHORT = 1000  # characters
CHILD = """
import json, re, sys
for line in sys.stdin:
    pattern, text = json.loads(line)
    print(int(re.search(pattern, text) is not None), flush=True)
"""


class PatternMatcher:
    """For a `with` block, at whose end the child process is killed."""

    def __init__(self, seconds: float = SECONDS):
        self.seconds, self.deadline = seconds, 0.0
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "PatternMatcher":
        return self

    def __exit__(self, *error: object) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()

    def search(self, pattern: str, text: str) -> bool:
        """Whether the pattern matches anywhere in the text. ValueError if the time is up."""
        compiled = re.compile(pattern)
        if len(text) <= SHORT and len(BACKTRACKS.findall(pattern)) <= 1:
            return compiled.search(text) is not None
        if self.process is None:
            command = [sys.executable, "-I", "-S", "-c", CHILD]
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={})
            self.deadline = time.monotonic() + self.seconds
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(json.dumps([pattern, text]).encode() + b"\n")
        stdin.flush()
        if not select.select([stdout], [], [], max(0.0, self.deadline - time.monotonic()))[0]:
            raise ValueError(f"matching the pattern {pattern[:80]} takes more than {self.seconds:g} s; simplify it")
        return stdout.readline() == b"1\n"
