"""The log-likelihoods and greedy outputs of a decoder in this process, in batches.

Rows are padded on the right to the longest of their batch, so a row has the same likelihood alone and in a batch. Rows
that differ in their last token only, such as the choices A, B, C and D, are computed once.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.engine.inputs import CAPACITY, context_limit, pad_ids
from regard.evals.scoring import Advance, ChatTurns, Likelihood, ScoredRow, encode_answered, in_batches
from regard.kernels.linear_logprobs import logprobs_of
from regard.language_model import LanguageModel
from regard.models.decoder import DecoderModule
from regard.text_generation import SamplingOptions

POSITIONS = 128  # whose logits are in memory at once


class LocalModel:
    """llm: as `regard.load` returns it. rows: scored or decoded at once. window: at most the context of the model.

    special: special tokens in texts become their ids, as a chat template that was rendered before needs it.
    """

    def __init__(
        self, llm: LanguageModel, rows: int = 16, window: int | None = None, name: str = "model", special: bool = False
    ):
        if not isinstance(llm.model, DecoderModule):
            raise ValueError(
                f"{name} is of kind {llm.model.spec.kind}, and likelihoods of texts need a decoder; use a decoder, or "
                "`regard eval MODEL --data FILE` for the loss and metrics of its own objective"
            )
        limit = llm.context or context_limit(llm.model)
        if window is not None and (window < 1 or (limit is not None and window > limit)):
            raise ValueError(f"window={window} is not between 1 and the {limit} tokens that {name} reads")
        self.llm, self.rows, self.name, self.special = llm, rows, name, special
        self.window: int = window or limit or CAPACITY
        self.start_id = llm.tokenizer.start_id

    def encode(self, text: str) -> list[int]:
        return self.llm.encode(text, special=self.special)

    def encode_chat(self, messages: ChatTurns) -> list[int]:
        return self.llm.encode_chat(messages)

    def encode_answered(self, messages: ChatTurns) -> list[int]:
        return encode_answered(self.llm.tokenizer, messages)

    @torch.inference_mode()
    def score(self, rows: Sequence[ScoredRow], on_progress: Advance = lambda done: None) -> list[Likelihood]:
        model = self.llm.model
        device = next(model.parameters()).device
        same_inputs: dict[tuple[int, ...], list[int]] = {}
        for index, row in enumerate(rows):
            same_inputs.setdefault(row.ids[:-1], []).append(index)
        longest_first = sorted(same_inputs, key=len, reverse=True)
        found: dict[int, Likelihood] = {}
        for first in range(0, len(longest_first), self.rows):
            batch = longest_first[first : first + self.rows]
            hidden = model.hidden(*pad_ids(batch, device))  # (B, L, D)
            for inputs, line in zip(batch, hidden, strict=True):
                for index in same_inputs[inputs]:
                    found[index] = self.score_row(rows[index], line[: len(inputs)])
            on_progress(sum(len(same_inputs[inputs]) for inputs in batch))
        return [found[index] for index in range(len(rows))]

    def score_row(self, row: ScoredRow, hidden: Tensor) -> Likelihood:
        """hidden (L, D) of all tokens but the last."""
        targets = torch.tensor(row.ids[row.start :], device=hidden.device)
        total, greedy = 0.0, True
        for part, wanted in zip(hidden[row.start - 1 :].split(POSITIONS), targets.split(POSITIONS), strict=True):
            logits = self.llm.model.logits(part)  # (L, V)
            total += float(logprobs_of(logits, wanted)[0].double().sum())
            greedy &= bool((logits.argmax(-1) == wanted).all())
        return Likelihood(total, greedy, len(targets))

    def complete(
        self,
        prompts: Sequence[Sequence[int]],
        max_new: int,
        stop: Sequence[str],
        on_progress: Advance = lambda done: None,
    ) -> list[str]:
        options: SamplingOptions = {"max_new": max_new, "temperature": 0.0}

        def complete_batch(batch: Sequence[Sequence[int]]) -> list[str]:
            return self.llm.texts.generate(
                [self.llm.prompt(list(ids), (), tuple(stop), True, options) for ids in batch]
            )

        return in_batches(complete_batch, prompts, self.rows, on_progress)
