"""Prefix language modelling: the prefix is attended to from both sides, the rest is predicted token by token.

    loss = Σ_{t ≥ p} w_t · -log p(token_t | tokens up to t - 1)                    Liu et al. 2018; Raffel et al. 2020

The tokens of the prefix attend to one another, so they could copy their targets and have no loss. The mask of the
attentions (`prefix_lm`) fixes the length p of the prefix; a random window of the document makes the split point random.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import nn

from regard.data.batch import Batch
from regard.data.packing import Item, pack
from regard.data.sources.base import Example
from regard.kernels.attention.mask import PrefixLM
from regard.models.base import Model
from regard.models.encoder import Encoder
from regard.models.heads import MaskedLM
from regard.objectives.base import Columns, LossResult, Objective, require_model
from regard.objectives.masked import masked
from regard.objectives.next_token import slice_columns
from regard.objectives.text import end_id, plain_text, require_tokens
from regard.parts.attention import Attention
from regard.spec import require
from regard.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class PrefixLanguageModel(Objective):
    """Examples have `text`."""

    packed = True

    prefix: int = 1  # tokens; that of the mask of the model

    def check(self) -> None:
        require(self.prefix > 0, f"{self.kind}: prefix={self.prefix} must be positive")

    def check_model(self, model: Model) -> None:
        blocks = model.blocks if isinstance(model, Encoder) and isinstance(model.head, MaskedLM) else ()
        bodies = [sublayer.body for block in blocks for sublayer in block.sublayers]
        masks = [body.mask for body in bodies if isinstance(body, Attention)]
        needed = "an encoder with a masked_lm head whose attentions have the mask prefix_lm"
        require_model(self, model, bool(masks) and all(isinstance(mask, PrefixLM) for mask in masks), needed)
        wrong = [mask for mask in masks if mask != PrefixLM(self.prefix)]
        require(
            not wrong,
            f"objective {self.kind} has prefix={self.prefix}, and the mask of an attention is {wrong[:1]}; set both to "
            "the same prefix",
        )

    def tokenize(self, example: Example, tokenizer: Tokenizer) -> Columns:
        ids = np.array(tokenizer.encode(plain_text(self, example)), np.int64)
        require_tokens(self, ids, example)
        return {"ids": np.append(ids, end_id(tokenizer))}

    def sample(self, columns: Columns, tokenizer: Tokenizer, length: int, rng: np.random.Generator) -> list[Item]:
        if length <= self.prefix:
            raise ValueError(f"length={length} must be longer than the prefix of {self.prefix}; raise data.length")
        pairs = len(columns["ids"]) - 1
        if pairs < self.prefix:
            return []
        first = int(rng.integers(min(length, pairs - self.prefix + 1)))
        items = [slice_columns(columns, start, length) for start in range(first, pairs, length)]
        weighted = [
            {**item, "weights": item["weights"] * (np.arange(len(item["tokens"])) >= self.prefix - 1)} for item in items
        ]
        return [item for item in weighted if item["weights"].any()]

    def collate(self, rows: Sequence[Sequence[Item]], tokenizer: Tokenizer, length: int) -> Batch:
        return pack(rows, length, tokenizer.pad or 0)

    def __call__(self, model: nn.Module, batch: Batch) -> LossResult:
        return masked(model, batch)
