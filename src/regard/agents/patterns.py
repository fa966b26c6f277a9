"""Matches the patterns of schemas that other programs wrote, within a time limit.

Python's `re` backtracks: `(a+)+$` takes exponential time, during which no other thread runs. Patterns that have more
than one repetition or alternative, and long ones or long texts, are therefore matched in a child process.
"""

import json
import math
import re
import select
import subprocess
import sys
import time

SECONDS = 5.0  # for all matches of a matcher
SHORT = 1000  # characters of a pattern and its text
BACKTRACKS = re.compile(r"[*+?{|]|\\\d|\)(?=\{)")  # with only one of these the time is at most quadratic
# The limit of CPU time ends the child if this process is killed; `(){2000000000}` would fill the memory.
CHILD = """
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[1]),) * 2)
resource.setrlimit(resource.RLIMIT_AS, (1 << 30,) * 2)
for line in sys.stdin:
    pattern, text = json.loads(line)
    try:
        found = re.search(pattern, text) is not None
    except Exception as error:
        found = str(error) or type(error).__name__
    print(json.dumps(found), flush=True)
"""


class PatternMatcher:
    """For a `with` block, at whose end the child process is killed."""

    def __init__(self, seconds: float = SECONDS):
        self.seconds, self.deadline = seconds, time.monotonic() + seconds
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "PatternMatcher":
        return self

    def __exit__(self, *error: object) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()

    def search(self, pattern: str, text: str) -> bool:
        """Whether the pattern matches anywhere in the text. ValueError if it is invalid, or the time is up."""
        if time.monotonic() < self.deadline and is_fast(pattern, text):
            return re.search(pattern, text) is not None
        try:
            found = self.search_in_child(pattern, text)
        except OSError:
            raise ValueError(f"the pattern {pattern[:80]} cannot be matched: the child process has ended") from None
        if isinstance(found, str):
            raise ValueError(f"the pattern {pattern[:80]} is invalid: {found}")
        return found

    def search_in_child(self, pattern: str, text: str) -> bool | str:
        """The result, or the message of an error."""
        if self.process is None:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", CHILD, str(math.ceil(self.seconds) + 1)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={},
                start_new_session=True,  # Ctrl-C does not reach it
            )  # fmt: skip
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(json.dumps([pattern, text]).encode() + b"\n")
        stdin.flush()
        poll = select.poll()
        poll.register(stdout, select.POLLIN)
        if not poll.poll(max(0.0, 1000 * (self.deadline - time.monotonic()))):
            raise ValueError(f"matching the pattern {pattern[:80]} takes more than {self.seconds:g} s; simplify it")
        answer = stdout.readline()
        if not answer:
            raise BrokenPipeError("the child process has ended")
        return json.loads(answer)


def is_fast(pattern: str, text: str) -> bool:
    return len(pattern) + len(text) <= SHORT and len(BACKTRACKS.findall(pattern)) <= 1
