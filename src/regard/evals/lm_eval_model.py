"""A model as lm-evaluation-harness (EleutherAI's `lm-eval`) asks for one, so that its tasks run on it.

    model = LocalModel(regard.load("smollm2"), special=True)
    lm_eval.simple_evaluate(LmEvalModel(model), tasks=[…])

The likelihoods and outputs are those of `regard eval --tasks`. lm-eval renders chat templates to strings, whose special
tokens the tokenizer must parse: `special=True`.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import redirect_stdout
from itertools import islice
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.api.model import LM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager

from regard.evals.local_model import LocalModel
from regard.evals.metrics import Estimate
from regard.evals.scoring import continuation_row, text_rows
from regard.evals.task_run import TaskResult
from regard.text.chat import render

BOOTSTRAPS = 1000  # of metrics without a formula for the standard error


class LmEvalModel(LM):
    def __init__(self, model: LocalModel):
        super().__init__()
        self.model, self.tokenizer = model, model.llm.tokenizer
        self.truncated: set[tuple[str | None, int | None]] = set()  # tasks and documents

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        rows = [continuation_row(self.model, *request.args) for request in requests]
        self.truncated |= {
            (each.task_name, each.doc_id) for each, row in zip(requests, rows, strict=True) if row.truncated
        }
        return [(found.logprob, found.greedy) for found in self.model.score(rows)]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        windows = [text_rows(self.model, request.args[0]) for request in requests]
        scored = iter(self.model.score([row for rows in windows for row in rows]))
        return [sum(found.logprob for found in islice(scored, len(rows))) for rows in windows]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Requests of the same settings are decoded in batches."""
        groups: dict[tuple, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(self.settings(request.args[1]), []).append(index)
        texts: dict[int, str] = {}
        for (max_new, stop), indices in groups.items():
            room = self.model.window - max_new
            if room < 1:
                raise ValueError(f"max_gen_toks={max_new} leaves no room in the {self.model.window} tokens; lower it")
            prompts = [self.model.encode(requests[index].args[0]) for index in indices]
            long = [requests[i] for i, ids in zip(indices, prompts, strict=True) if len(ids) > room]
            self.truncated |= {(each.task_name, each.doc_id) for each in long}
            texts |= zip(indices, self.model.complete([ids[-room:] for ids in prompts], max_new, stop), strict=True)
        return [texts[index] for index in range(len(requests))]

    def settings(self, given: dict[str, Any]) -> tuple[int, tuple[str, ...]]:
        found = normalize_gen_kwargs(given)
        if found["do_sample"]:
            raise ValueError(f"{given} asks for sampled outputs, and these are greedy; use do_sample: false")
        return found["max_gen_toks"], tuple(stop for stop in found["until"] if stop)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        template = self.chat_template(True)
        return render(template, chat_history, add_generation_prompt, self.tokenizer.special_tokens_map)

    def chat_template(self, chat_template: bool | str = False) -> str:
        if self.tokenizer.chat_template is None:
            raise ValueError(f"{self.model.name} has no chat template; leave out --chat")
        return self.tokenizer.chat_template

    @property
    def tokenizer_name(self) -> str:
        return self.model.name


def run_lm_eval(
    model: LocalModel, task: str | Path | dict[str, Any], limit: int | None, shots: int, chat: bool
) -> list[TaskResult]:
    """The results of a task or group of lm-eval, a YAML file or its contents. shots: 0 leaves their number to it."""
    asked = LmEvalModel(LocalModel(model.llm, model.rows, model.window, model.name, special=True))
    with redirect_stdout(sys.stderr):  # it prints while it works
        found = lm_eval.simple_evaluate(
            asked,
            tasks=[task if isinstance(task, dict) else str(task)],
            num_fewshot=shots or None,
            limit=limit,
            apply_chat_template=chat,
            bootstrap_iters=BOOTSTRAPS,
            task_manager=TaskManager(include_defaults=False),
        )
    assert found is not None, "only other ranks get None"
    samples = {name: list(map(sample_of, given)) for name, given in found["samples"].items()}
    truncated = Counter(task for task, _ in asked.truncated)
    return [
        TaskResult(
            name, "lm-eval", len(samples[name]), found["n-shot"].get(name, 0), truncated[name], estimates(values),
            samples[name],
        )
        for name, values in found["results"].items() if name in samples
    ]  # fmt: skip


def estimates(values: dict[str, Any]) -> dict[str, Estimate]:
    """From {"acc,none": …, "acc_stderr,none": …}; a filter other than none stays in the name."""
    found = {}
    for key, value in values.items():
        name, _, filter = key.partition(",")
        if filter and not name.endswith("_stderr") and isinstance(value, int | float):
            error = values.get(f"{name}_stderr,{filter}")
            label = name if filter == "none" else key
            found[label] = Estimate(float(value), float(error) if isinstance(error, int | float) else None)
    return found


def sample_of(sample: dict[str, Any]) -> dict[str, Any]:
    return {
        "where": f"document {sample['doc_id']}", "target": str(sample["target"]),
        "responses": [str(response) for response in sample["filtered_resps"]],
    }  # fmt: skip
