"""Training data that are written prompt by prompt, in the order of the prompts, and continued after an interruption.

Every line has an `id` of the prompt's number and of a hash of the prompt and the settings. A prompt may have no line (a
pair without a verdict), so a file is continued after the prompt of its last line.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from regard.data.appended_lines import AppendedLines
from regard.data.sources.base import Example
from regard.feedback.prompts import CountDone
from regard.objectives.reinforcement import prompt_of

PROMPTS = 32  # that are worked on together, after which their lines are written

Line = Mapping[str, Any]
MakeLines = Callable[[Sequence[Any], Sequence[int]], Sequence[Line | None]]  # (prompts, their numbers) -> lines


class PromptOutput:
    """The output file. `start` is the number of the first prompt that it has no line for, nor for a later one."""

    def __init__(self, path: Path, examples: Sequence[Example], settings: Mapping[str, Any]):
        self.prompts = [prompt_of(example) for example in examples]
        self.ids = [line_id(number, prompt, settings) for number, prompt in enumerate(self.prompts)]
        self.lines = AppendedLines(path)
        try:
            self.start = self.find_start(path)
        except ValueError:
            self.lines.stream.close()
            raise

    def __enter__(self) -> "PromptOutput":
        return self

    def __exit__(self, *error: object) -> None:
        self.lines.stream.close()

    def find_start(self, path: Path) -> int:
        numbers, start = {id: number for number, id in enumerate(self.ids)}, 0
        for line, entry in self.lines.entries():
            number = numbers.get(entry.get("id")) if isinstance(entry, dict) else None
            if number is None or number < start:
                raise ValueError(
                    f"{path}, line {line}: not written by this command with these prompts and settings; choose another "
                    "--out, or remove the file"
                )
            start = number + 1
        return start

    def write(self, make_lines: MakeLines, on_progress: CountDone = lambda done: None) -> None:
        """Make and append the lines of all prompts from `start` on."""
        for first in range(self.start, len(self.prompts), PROMPTS):
            numbers = range(first, min(first + PROMPTS, len(self.prompts)))
            found = make_lines([self.prompts[number] for number in numbers], numbers)
            for number, line in zip(numbers, found, strict=True):
                if line is not None:
                    self.lines.append({"id": self.ids[number], **line})
            on_progress(numbers.stop)


def line_id(number: int, prompt: Any, settings: Mapping[str, Any]) -> str:
    content = json.dumps([prompt, settings], sort_keys=True, default=str)
    return f"{number}-{blake2b(content.encode('utf-8', 'surrogatepass'), digest_size=6).hexdigest()}"
