"""Masked language modelling: predict masked tokens from both sides. Devlin et al. 2018 (BERT).

15 % of the tokens are chosen. Of these 80 % are replaced by [MASK], 10 % by a random token, and 10 % are kept, because
[MASK] does not occur after pretraining. The loss is over the chosen tokens only. With `whole_words`, words are chosen
instead of tokens, with all their tokens. Special tokens are never chosen. The choice is random in every epoch.

A document is sliced to the length of a row, and every slice has the special tokens of the tokenizer ([CLS] … [SEP]).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import nn

from regard.data.batch import Batch
from regard.data.packing import Item, pack
from regard.data.sources.base import Example
from regard.models.base import Model
from regard.models.encoder import Encoder
from regard.models.heads import MaskedLM
from regard.objectives.base import Columns, LossResult, Objective, layout_of, require_model, token_loss
from regard.objectives.text import plain_text, require_tokens
from regard.spec import SpecError, require
from regard.text.borders import encode_words
from regard.text.tokenizer import Tokenizer
from regard.text.train import CLS, MASK, SEP


@dataclass(frozen=True)
class MaskedTokens(Objective):
    """Examples have `text`."""

    share: float = 0.15  # fraction of the tokens that are chosen
    mask: float = 0.8  # fraction of the chosen tokens that become [MASK]
    random: float = 0.1  # fraction of the chosen tokens that become a random token
    whole_words: bool = False
    packed: bool = True  # several documents per row

    special_tokens = (MASK, CLS, SEP)

    def check(self) -> None:
        require(0 < self.share < 1, f"{self.kind}: share={self.share} must be between 0 and 1")
        shares = min(self.mask, self.random, 1 - self.mask - self.random)
        require(
            shares >= -1e-9,
            f"{self.kind}: mask={self.mask} and random={self.random} must not be negative, nor their sum above 1",
        )

    def check_model(self, model: Model) -> None:
        fits = isinstance(model, Encoder) and isinstance(model.head, MaskedLM)
        require_model(self, model, fits, "an encoder with a masked_lm head")

    def prepare_tokenizer(self, tokenizer: Tokenizer) -> None:
        mask_id(tokenizer)

    def tokenize(self, example: Example, tokenizer: Tokenizer) -> Columns:
        text = plain_text(self, example)
        if self.whole_words:
            ids, words = encode_words(tokenizer, text)
            columns = {"ids": ids, "words": words}
        else:
            columns = {"ids": np.array(tokenizer.encode(text), np.int64)}
        require_tokens(self, columns["ids"], example)
        return columns

    def sample(self, columns: Columns, tokenizer: Tokenizer, length: int, rng: np.random.Generator) -> list[Item]:
        prefix, suffix = tokenizer.prefix_ids, tokenizer.suffix_ids
        size = length - len(prefix) - len(suffix)
        if size < 1:
            raise ValueError(
                f"length={length} has no space beside the special tokens of this tokenizer; raise data.length"
            )
        items = []
        for start in range(0, len(columns["ids"]), size):
            ids = np.concatenate([prefix, columns["ids"][start : start + size], suffix]).astype(np.int64)
            words = np.arange(len(ids))
            if "words" in columns:  # the numbers of words are positive
                inner = columns["words"][start : start + size]
                words = np.concatenate([np.zeros(len(prefix)), inner, np.zeros(len(suffix))]).astype(np.int64)
            items.append(self.masked_item(ids, words, tokenizer, rng))
        return [item for item in items if item["weights"].any()]

    def masked_item(self, ids: np.ndarray, words: np.ndarray, tokenizer: Tokenizer, rng: np.random.Generator) -> Item:
        """`tokens` in which some are masked, `targets` and `weights`."""
        chosen = choose_words(words, ~np.isin(ids, tokenizer.all_special_ids), self.share, rng)
        u = rng.random(len(ids))
        tokens = np.where(chosen & (u < self.mask), mask_id(tokenizer), ids)
        replaced = chosen & (self.mask <= u) & (u < self.mask + self.random)
        tokens[replaced] = random_ids(tokenizer, int(replaced.sum()), rng)
        return {"tokens": tokens, "targets": ids, "weights": chosen.astype(np.float32)}

    def collate(self, rows: Sequence[Sequence[Item]], tokenizer: Tokenizer, length: int) -> Batch:
        return pack(rows, length, tokenizer.pad or 0)

    def __call__(self, model: nn.Module, batch: Batch) -> LossResult:
        return masked(model, batch)


def choose_words(words: np.ndarray, allowed: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """True for the tokens of words chosen with probability `share`; if none is chosen by chance, one is."""
    numbers = np.unique(words[allowed])
    if not len(numbers):
        return np.zeros(len(words), bool)
    chosen = numbers[rng.random(len(numbers)) < share]
    chosen = chosen if len(chosen) else numbers[[rng.integers(len(numbers))]]
    return np.isin(words, chosen) & allowed


def random_ids(tokenizer: Tokenizer, count: int, rng: np.random.Generator) -> np.ndarray:
    """Uniform draws from the vocabulary without its special tokens."""
    ids = rng.integers(tokenizer.vocab_size, size=count)
    while (special := np.isin(ids, tokenizer.all_special_ids)).any():
        ids[special] = rng.integers(tokenizer.vocab_size, size=int(special.sum()))
    return ids


def mask_id(tokenizer: Tokenizer) -> int:
    token = tokenizer.special_tokens_map.get("mask_token", MASK)
    id = tokenizer.core.token_to_id(token)
    if id is None:
        raise SpecError(
            "this tokenizer has no mask token; train a tokenizer (tokenizer.by='bpe'), or use that of a masked "
            "language model"
        )
    return id


def masked(model: nn.Module, batch: Batch) -> LossResult:
    """Needs tokens, targets, weights, positions and segments, all (B, L); for pairs of sequences also types."""
    return token_loss(model(batch.tokens, layout_of(batch), batch.get("types"), outputs=True), batch, sparse=True)
