"""Generated outputs: examples are decoded greedily, compared with their targets as a whole, and rated by a reward.

    {"messages": […]}                  the last message, after the conversation before it, in the chat template
    {"prompt": …, "completion": …}     the completion, or the `answer`; a prompt may be a list of messages
    {"source": …, "target": …}         the output of an encoder-decoder

If all targets are JSON objects, the form counts separately: an output that is a JSON object with the target's keys and
nothing else, whatever its values. With a reward, examples need no target.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from regard.data.sources.base import Example, Examples
from regard.data.targets import has_target, is_well_formed, target_of
from regard.engine.engine import Engine
from regard.engine.inputs import decoder_of
from regard.engine.request import GenerationError, Request, Sampling
from regard.text.chat import encode_chat
from regard.text.messages import checked_messages, tools_of
from regard.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class GradedOutput:
    prompt: str  # the last message of a conversation
    target: str | None  # None: the example has none
    output: str  # the model's
    reward: float | None = None

    @property
    def correct(self) -> bool:
        return self.output == self.target

    @property
    def well_formed(self) -> bool | None:
        """Whether the output has the form of the target; None if the target is not a JSON object."""
        return None if self.target is None else is_well_formed(self.output, self.target)


@torch.inference_mode()
def grade_outputs(
    model: nn.Module,
    tokenizer: Tokenizer,
    examples: Examples,
    count: int,
    max_new: int = 128,
    rows: int = 32,
    on_progress: Callable[[int], None] = lambda done: None,
    reward: Callable[[Sequence[Example], Sequence[str], Sequence[bool]], list[float]] | None = None,
) -> list[GradedOutput]:
    """Generate the outputs of the first `count` examples, `rows` at once; `on_progress` is called with their number.

    reward: also gets which outputs were cut off by `max_new`.
    """
    chosen = [examples.example(index) for index in range(count)]
    targets = [target_of(example) if reward is None or has_target(example) else None for example in chosen]
    prompts = [encode_prompt(example, tokenizer) for example in chosen]
    engine = Engine(
        model,
        rows=min(rows, count),
        capacity=min(max(len(ids) for ids, _ in prompts) + max_new, decoder_of(model).spec.context or sys.maxsize),
        source_capacity=max(len(source or ()) for _, source in prompts) or None,
    )
    sampling = Sampling(max_new=max_new, temperature=0, stop_ids=tokenizer.stop_ids)
    graded: list[GradedOutput] = []
    truncated: list[bool] = []
    requests = run_in_batches(engine, prompts, sampling, on_progress)
    for each, target, request in zip(chosen, targets, requests, strict=True):
        graded.append(GradedOutput(last_prompt(each), target, tokenizer.decode(request.output_ids).strip()))
        truncated.append(request.finish == "length")
    if reward is None:
        return graded
    rewards = reward(chosen, [output.output for output in graded], truncated)
    return [replace(output, reward=value) for output, value in zip(graded, rewards, strict=True)]


EncodedPrompt = tuple[list[int], list[int] | None]


def run_in_batches(
    engine: Engine, prompts: Sequence[EncodedPrompt], sampling: Sampling, on_progress: Callable[[int], None]
) -> list[Request]:
    """The requests of prompts, as many at once as the engine has rows. GenerationError if one fails.

    `on_progress` is called with the number of finished requests.
    """
    requests: list[Request] = []
    for first in range(0, len(prompts), engine.store.rows):
        batch = [engine.submit(ids, sampling, source) for ids, source in prompts[first : first + engine.store.rows]]
        while not engine.idle:
            engine.step()
        if (error := next((request.error for request in batch if request.error is not None), None)) is not None:
            raise GenerationError(error)
        requests += batch
        on_progress(len(requests))
    return requests


def encode_prompt(example: Example, tokenizer: Tokenizer) -> EncodedPrompt:
    """The ids of the decoder's prompt, and of the source of an encoder-decoder."""
    if "source" not in example:
        prompt = messages_before(example) if example.get("messages") is not None else example["prompt"]
        if isinstance(prompt, str):
            return [*tokenizer.prefix_ids, *tokenizer.encode(prompt)], None
        return encode_chat(tokenizer, checked_messages(prompt), tools=tools_of(example)), None
    if tokenizer.decoder_start is None:
        raise ValueError(
            "the tokenizer has no token that starts an output; set decoder_start_token_id in generation_config.json"
        )
    return [tokenizer.decoder_start], tokenizer.encode_with_special_tokens(example["source"])


def messages_before(example: Example) -> list[dict[str, str]]:
    return example["messages"][:-1] if has_target(example) else example["messages"]


def last_prompt(example: Example) -> str:
    """The source, the prompt, or its last message."""
    if example.get("messages") is not None:
        return messages_before(example)[-1]["content"]
    prompt = example["source"] if "source" in example else example["prompt"]
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]
