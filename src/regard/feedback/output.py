"""Training data that are written prompt by prompt, in the order of the prompts, and continued after an interruption.

Every line has an `id` of the prompt's number, a hash of the prompt and the settings, and a hash of the weights of the
models. A prompt may have no line (a pair without a verdict), so a file is continued after the prompt of its last line:
prompts after it that got no line are answered again.
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
from regard.training.base_model import fingerprint_model
from regard.training.run import newest_checkpoint

PROMPTS = 32  # that are worked on together, after which their lines are written

Line = Mapping[str, Any]
MakeLines = Callable[[Sequence[Any], Sequence[int]], Sequence[Line | None]]  # (prompts, their numbers) -> lines


class PromptOutput:
    """The output file. `start` is the number of the first prompt that it has no line for, nor for a later one.

    models: runs, folders or names; the lines depend on their weights.
    """

    def __init__(
        self, path: Path, examples: Sequence[Example], settings: Mapping[str, Any], models: Sequence[str] = ()
    ):
        self.prompts = [prompt_of(example) for example in examples]
        weights = digest([fingerprint_model(newest_checkpoint(name)) for name in models])
        asked = [f"{number}-{digest([prompt, settings])}" for number, prompt in enumerate(self.prompts)]
        self.ids = [f"{start}-{weights}" for start in asked]
        self.models = models
        self.lines = AppendedLines(path)
        try:
            self.start = self.find_start(path)
        except ValueError:
            self.lines.stream.close()
            raise

    def __enter__(self) -> "PromptOutput":
        return self

    def __exit__(self, *error: Any) -> None:
        self.lines.__exit__(*error)

    def find_start(self, path: Path) -> int:
        numbers, start = {without_weights(id): number for number, id in enumerate(self.ids)}, 0
        for line, entry in self.lines.entries(f'{{"id": "{id}"'.encode() for id in self.ids):
            id = str(entry.get("id")) if isinstance(entry, dict) else ""
            number = numbers.get(without_weights(id))
            if number is None or number < start:
                raise ValueError(
                    f"{path}, line {line}: not written by this command with these prompts and settings; choose another "
                    "--out, or remove the file"
                )
            if id != self.ids[number]:
                raise ValueError(
                    f"{path}, line {line}: written with another model, or with other weights of "
                    f"{' or '.join(self.models)}, such as an earlier checkpoint; give the same model again, or choose "
                    "another --out"
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


def without_weights(id: str) -> str:
    return id.rpartition("-")[0]


def digest(value: Any) -> str:
    content = json.dumps(value, sort_keys=True, default=str)
    return blake2b(content.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()
