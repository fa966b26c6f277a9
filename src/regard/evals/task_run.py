"""Run an evaluation task: its metrics, and what the model did on every row.

    perplexity   bits_per_byte = -Σ log p / (Σ bytes · ln 2), byte_perplexity = 2 ** bits_per_byte; perplexity per token
    choice       accuracy of the most likely choice; accuracy_norm of the one with the most likely character on average
    generation   greedy outputs: exact_match, normalized_match, f1 and rouge_l (metrics.py)

The standard errors are over rows. The names acc and acc_norm of lm-evaluation-harness are accuracy and accuracy_norm.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from regard.evals.metrics import OUTPUT_METRICS, Estimate, best, mean, ratio
from regard.evals.scoring import Advance, ScoredModel, answer_row, continuation_row, text_rows
from regard.evals.task_file import EvalQuestion, EvalTask

LN2 = math.log(2)
TEXTS = 32  # tokenized and scored at once


@dataclass(frozen=True)
class TaskResult:
    task: str
    kind: str
    rows: int
    shots: int
    truncated: int  # rows whose context was truncated from the left
    metrics: dict[str, Estimate]
    samples: list[dict[str, Any]]

    def to_json(self) -> dict[str, Any]:
        metrics = {name: {"value": value, "error": error} for name, (value, error) in self.metrics.items()}
        return vars(self) | {"metrics": metrics}


@dataclass(frozen=True)
class TaskPrompts:
    """How the questions of a task are put to a model."""

    task: EvalTask
    shots: Sequence[EvalQuestion] = ()
    chat: bool = False

    def prompt(self, question: EvalQuestion) -> str:
        before = "".join(
            f"{shot.prompt}{self.task.delimiter}{shot.answers[0]}{self.task.separator}" for shot in self.shots
        )
        return self.task.description + before + question.prompt

    def messages(self, question: EvalQuestion) -> list[dict[str, str]]:
        """The examples as earlier turns; the description begins the first message."""
        messages = []
        for each in (*self.shots, question):
            content = each.prompt if messages else self.task.description + each.prompt
            messages.append({"role": "user", "content": content})
            if each is not question:
                messages.append({"role": "assistant", "content": each.answers[0]})
        return messages

    @property
    def stop(self) -> tuple[str, ...]:
        default = () if self.chat else tuple(filter(None, [self.task.separator]))
        return default if self.task.stop is None else self.task.stop


def evaluate_task(
    model: ScoredModel,
    task: EvalTask,
    limit: int | None = None,
    shots: int = 0,
    chat: bool = False,
    on_progress: Advance = lambda done: None,
) -> TaskResult:
    """limit: the first rows only. shots: the first examples of the task, before every prompt. chat: ask in the chat
    template. on_progress: called with the number of rows, choices or texts that are done since the last call."""
    check_options(task, shots, chat)
    if task.kind == "perplexity":
        return measure_perplexity(model, task, task.questions[:limit], on_progress)
    prompts = TaskPrompts(task, task.shots[:shots], chat)
    run = measure_choices if task.kind == "choice" else measure_outputs
    return run(model, prompts, task.questions[:limit], on_progress)


def check_options(task: EvalTask, shots: int, chat: bool) -> None:
    if task.kind == "perplexity" and (shots or chat):
        option = "--shots" if shots else "--chat"
        raise ValueError(f"{task.name} is of kind perplexity, in which {option} has no effect; leave it out")
    if shots > len(task.shots):
        found = f"has {len(task.shots)} examples" if task.shots else "has no examples"
        raise ValueError(f"{task.name} {found}, fewer than --shots {shots}; name a file of them by `shots` in its TOML")


def work_of(task: EvalTask, limit: int | None) -> int:
    """What `on_progress` counts up to."""
    return sum(max(1, len(question.choices)) for question in task.questions[:limit])


def measure_perplexity(
    model: ScoredModel, task: EvalTask, texts: Sequence[EvalQuestion], on_progress: Advance
) -> TaskResult:
    samples: list[dict[str, Any]] = []
    if empty := [text for text in texts if not text.prompt]:
        raise ValueError(f"{empty[0].where}: the text is empty, so it has no perplexity; remove it")
    for first in range(0, len(texts), TEXTS):
        batch = texts[first : first + TEXTS]
        rows = [text_rows(model, text.prompt) for text in batch]
        scored = iter(model.score([row for windows in rows for row in windows]))
        for text, windows in zip(batch, rows, strict=True):
            found = list(islice(scored, len(windows)))
            logprob, tokens = math.fsum(each.logprob for each in found), sum(each.tokens for each in found)
            size = len(text.prompt.encode())
            samples.append({"where": text.where, "logprob": logprob, "tokens": tokens, "bytes": size})
        on_progress(len(batch))
    nats = [-sample["logprob"] for sample in samples]
    per_byte = ratio(nats, [sample["bytes"] for sample in samples])
    per_token = ratio(nats, [sample["tokens"] for sample in samples])
    bits = Estimate(per_byte.value / LN2, None if per_byte.error is None else per_byte.error / LN2)
    metrics = {"bits_per_byte": bits, "byte_perplexity": exponential(per_byte), "perplexity": exponential(per_token)}
    return TaskResult(task.name, task.kind, len(samples), 0, 0, metrics, samples)


def exponential(metric: Estimate) -> Estimate:
    """The error to first order."""
    value = math.exp(metric.value)
    return Estimate(value, None if metric.error is None else value * metric.error)


def measure_choices(
    model: ScoredModel, prompts: TaskPrompts, questions: Sequence[EvalQuestion], on_progress: Advance
) -> TaskResult:
    rows = []
    for question in questions:
        for choice in question.choices:
            try:
                if prompts.chat:
                    row = answer_row(model, prompts.messages(question), choice)
                else:
                    row = continuation_row(model, prompts.prompt(question), prompts.task.delimiter + choice)
            except ValueError as error:
                raise ValueError(f"{question.where}: {error}") from None
            rows.append(row)
    scored, truncated, position = model.score(rows, on_progress), 0, 0
    samples: list[dict[str, Any]] = []
    for question in questions:
        span = slice(position, position + len(question.choices))
        position = span.stop
        logprobs = [each.logprob for each in scored[span]]
        per_character = [value / len(choice) for value, choice in zip(logprobs, question.choices, strict=True)]
        right = question.choices.index(question.answers[0])
        truncated += any(row.truncated for row in rows[span])
        samples.append(
            {
                "where": question.where, "prompt": question.prompt, "choices": list(question.choices), "answer": right,
                "logprobs": logprobs, "accuracy": float(logprobs.index(max(logprobs)) == right),
                "accuracy_norm": float(per_character.index(max(per_character)) == right),
            }
        )  # fmt: skip
    return result_of(prompts, samples, truncated, ("accuracy", "accuracy_norm"))


def measure_outputs(
    model: ScoredModel, prompts: TaskPrompts, questions: Sequence[EvalQuestion], on_progress: Advance
) -> TaskResult:
    room, truncated, encoded = model.window - prompts.task.max_new, 0, []
    if room < 1:
        raise ValueError(
            f"{prompts.task.name}: max_new = {prompts.task.max_new} leaves no room for a prompt in the {model.window} "
            "tokens that the model reads; lower it"
        )
    for question in questions:
        ids = model.encode_chat(prompts.messages(question)) if prompts.chat else model.encode(prompts.prompt(question))
        ids = ids or [id for id in [model.start_id] if id is not None]
        truncated += len(ids) > room
        encoded.append(ids[-room:])
    outputs = model.complete(encoded, prompts.task.max_new, prompts.stop, on_progress)
    samples = []
    for question, output in zip(questions, outputs, strict=True):
        values = {name: best(metric, output, question.answers) for name, metric in OUTPUT_METRICS.items()}
        answers = list(question.answers)
        samples.append(
            {"where": question.where, "prompt": question.prompt, "answer": answers, "output": output.strip(), **values}
        )
    return result_of(prompts, samples, truncated, OUTPUT_METRICS)


def result_of(prompts: TaskPrompts, samples: list[dict[str, Any]], truncated: int, names: Iterable[str]) -> TaskResult:
    metrics = {name: mean([sample[name] for sample in samples]) for name in names}
    task, shots = prompts.task, len(prompts.shots)
    return TaskResult(task.name, task.kind, len(samples), shots, truncated, metrics, samples)
