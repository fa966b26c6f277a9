"""Prompts of a file or of the simulated world, and the answers of a model to them.

    {"prompt": …}         a string that is continued, or a list of messages that are answered
    {"messages": […]}     the messages before the last answer of the assistant

Other columns are passed to reward functions. The seed of a sampled answer depends on its number only, not on the batch.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regard.data.readers import read_examples
from regard.data.sources.base import Example
from regard.data.world.answers import ask
from regard.engine.request import derived_seed
from regard.language_model import LanguageModel
from regard.objectives.reinforcement import prompt_of
from regard.text.messages import checked_messages

WORLD = "world"  # the name of the prompts of the simulated world
WORLD_REWARD = "regard.data.world.answers:score_answers"
WORLD_COUNT = 200
HELD_OUT = 1 << 51  # the first seed of held-out stories, beyond those of training and of other evaluations
CHUNK = 64  # prompts that are submitted at once, after which the progress is shown

CountDone = Callable[[int], None]
GenerateAnswers = Callable[[Sequence[Any], Sequence[int]], list[str]]  # (prompts, numbers of the answers) -> answers
MessageList = list[dict[str, Any]]


def is_world(source: str) -> bool:
    """Whether prompts of this name are questions about the world, and not those of a file."""
    return source == WORLD and not Path(source).exists()


def read_prompts(source: str, count: int | None = None, split: str = "held-out") -> list[Example]:
    """The first `count` examples of a file, or questions about stories of the world's `split`."""
    if is_world(source):
        first = HELD_OUT if split == "held-out" else 0
        return [ask(first + number, 1, split) for number in range(count or WORLD_COUNT)]
    if not Path(source).exists():
        raise ValueError(f"--prompts {source}: there is no such file; give a .jsonl file with `prompt`, or {WORLD}")
    rows = read_examples(source)
    examples: list[Example] = [rows[index] for index in range(min(len(rows), count or len(rows)))]
    for index, example in enumerate(examples):
        if example.get("prompt") is None and "messages" not in example:
            raise ValueError(
                f"{rows.origin(index)}: no `prompt` or `messages`; it has {', '.join(example) or 'nothing'}; give "
                "every line a prompt, a string or a list of messages"
            )
        try:
            check_prompt(example)
        except ValueError as error:
            raise ValueError(f"{rows.origin(index)}: {error}") from error
    return examples


def check_prompt(example: Example) -> None:
    """Raise ValueError for a prompt that is neither a string nor messages, and for wrong messages beside it."""
    prompt = prompt_of(example)
    if example.get("tools"):
        raise ValueError("prompts with `tools` cannot be answered here; remove them, or let a server answer")
    if prompt == "":
        raise ValueError("the prompt is empty; write one, or remove this example")
    if not isinstance(prompt, str):
        checked_messages(prompt)
    if example.get("messages") is not None:
        checked_messages(example["messages"])
    json.dumps(prompt, ensure_ascii=False).encode()  # raises UnicodeEncodeError, a ValueError, for surrogates


def as_messages(prompt: Any) -> MessageList:
    """A string is one message of the user."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def shown_prompt(prompt: Any) -> str:
    """A prompt as text, for a judge: one message as its content, several with their roles."""
    messages = as_messages(prompt)
    if len(messages) == 1:
        return str(messages[0]["content"]).strip()
    return "\n".join(f"{message['role']}: {str(message['content']).strip()}" for message in messages)


@dataclass(frozen=True)
class AnswerOptions:
    max_new: int = 256
    temperature: float = 0.0
    seed: int = 0


@dataclass
class ModelAnswers:
    """A model's answers to messages, and its continuations of strings."""

    llm: LanguageModel
    options: AnswerOptions
    cut_off: list[bool] = field(default_factory=list)  # for every answer up to now, whether it reached max_new

    def __call__(
        self, prompts: Sequence[Any], numbers: Sequence[int], on_progress: CountDone = lambda done: None
    ) -> list[str]:
        """numbers: of the answers, from which their seeds follow."""
        answers: list[str] = []
        for start in range(0, len(prompts), CHUNK):
            chunk = zip(prompts[start : start + CHUNK], numbers[start : start + CHUNK], strict=True)
            jobs = self.llm.texts.run([encode(self.llm, prompt, self.options, number) for prompt, number in chunk])
            answers += [job.text for job in jobs]
            self.cut_off += [job.cut_off for job in jobs]
            on_progress(len(answers))
        return answers

    def describe_cut_off(self) -> str:
        limit = f"{self.options.max_new} tokens; --max-new allows longer ones"
        return f"{sum(self.cut_off)} of {len(self.cut_off)} generated texts were cut off at {limit}"


def encode(llm: LanguageModel, prompt: Any, options: AnswerOptions, number: int) -> Any:
    continues = isinstance(prompt, str)
    ids = llm.encode(prompt) if continues else llm.encode_chat(prompt)
    return llm.prompt(
        ids, (), (), continues,
        {
            "max_new": options.max_new,
            "temperature": options.temperature,
            "seed": derived_seed(options.seed, number),
        },
    )  # fmt: skip
