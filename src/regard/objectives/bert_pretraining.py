"""BERT's pretraining: masked tokens, and whether the second of two segments follows the first. Devlin et al. 2018.

    [CLS] A [SEP] B [SEP]        loss = mean over masked tokens  +  mean over pairs of -log p(label)

A document is cut into pairs of segments of one or more sentences. In half of the pairs B follows A (label 0), in the
others B comes from another document (label 1). A sentence that has no neighbor in the row is cut at a random token. The
loss divides by the number of masked tokens, so every pair has the weight (masked tokens) / (pairs) of the whole batch,
which is part of the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch.nn.functional as F
from torch import nn

from regard.data.batch import Batch
from regard.data.packing import Item, item_length, pack
from regard.data.sources.base import Example
from regard.models.base import Model
from regard.models.encoder import Encoder
from regard.models.heads import PreTraining
from regard.objectives.base import Columns, LossResult, Objective, padded_layout, require_model, token_loss
from regard.objectives.inputs import stack_labels
from regard.objectives.masked import MaskedTokens, mask_id
from regard.objectives.text import plain_text, require_tokens
from regard.parts.input import Tokens
from regard.spec import SpecError, require
from regard.text.borders import encode_words, split_sentences
from regard.text.tokenizer import Tokenizer

FOLLOWS, RANDOM = 0, 1  # labels, as in transformers


@dataclass(frozen=True)
class BertPretraining(Objective):
    """Examples have `sentences` (a list of strings) or `text`, which is split into sentences."""

    needs_other: ClassVar[bool] = True

    masking: MaskedTokens = MaskedTokens()
    random: float = 0.5  # fraction of the pairs whose second segment comes from another document

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return self.masking.special_tokens

    def check(self) -> None:
        require(0 < self.random < 1, f"{self.kind}: random={self.random} must be between 0 and 1")

    def check_model(self, model: Model) -> None:
        fits = isinstance(model, Encoder) and isinstance(model.head, PreTraining)
        require_model(self, model, fits, "an encoder with a pretraining head")
        assert isinstance(model, Encoder) and isinstance(model.head, PreTraining)
        labels, types = model.head.pair.labels, model.input.types if isinstance(model.input, Tokens) else 0
        require(
            labels == 2, f"objective {self.kind}: pairs have two labels, not {labels}; set model.head.pair.labels=2"
        )
        require(types > 1, f"objective {self.kind} gives the two segments the types 0 and 1; set model.input.types=2")

    def prepare_tokenizer(self, tokenizer: Tokenizer) -> None:
        mask_id(tokenizer)
        pair_template(tokenizer)

    def tokenize(self, example: Example, tokenizer: Tokenizer) -> Columns:
        sentences = example["sentences"] if "sentences" in example else split_sentences(plain_text(self, example))
        if not all(isinstance(sentence, str) for sentence in sentences):
            raise ValueError(f"`sentences` of an example must be a list of strings, found {sentences!r:.80}")
        encoded = [encode_words(tokenizer, sentence) for sentence in sentences]
        ids = np.concatenate([np.array([], np.int64), *(ids for ids, _ in encoded)])
        require_tokens(self, ids, example)
        # Word numbers stay distinct, because a sentence has at most as many words as characters.
        first_words = np.cumsum([0, *(len(sentence) for sentence in sentences)])
        words = np.concatenate([words + first for (_, words), first in zip(encoded, first_words, strict=False)])
        numbers = np.repeat(np.arange(len(encoded)), [len(ids) for ids, _ in encoded])
        return {"ids": ids, "words": words, "sentences": numbers}

    def sample(self, columns: Columns, tokenizer: Tokenizer, length: int, rng: np.random.Generator) -> list[Item]:
        template = pair_template(tokenizer)
        size = length - template.size
        if size < 2:
            raise ValueError(f"length={length} has no space for a pair and its special tokens; raise data.length")
        ends = sentence_ends(columns["sentences"])
        other_starts = [0, *sentence_ends(columns["other_sentences"])[:-1]]
        items, start = [], 0
        while start < len(columns["ids"]):
            fitting = [end for end in ends if start < end <= start + size] or [min(start + size, ends[-1])]
            borders, begins = fitting[:-1], other_starts
            if not borders:  # one sentence: A and B are parts of it, so that its label is drawn like all others
                borders, begins = list(range(start + 1, fitting[-1])), list(range(len(columns["other_ids"])))
            if not borders:  # one token
                start = fitting[-1]
                continue
            first = slice(start, borders[rng.integers(len(borders))])
            is_random = rng.random() < self.random
            if is_random:
                begin, free = begins[rng.integers(len(begins))], size - (first.stop - first.start)
                second, start = slice(begin, begin + free), first.stop
            else:
                second, start = slice(first.stop, fitting[-1]), fitting[-1]
            items.append(self.pair(columns, first, second, is_random, template, tokenizer, rng))
        return [item for item in items if item["weights"].any()]

    def pair(
        self,
        columns: Columns,
        first: slice,
        second: slice,
        is_random: bool,
        template: "PairTemplate",
        tokenizer: Tokenizer,
        rng: np.random.Generator,
    ) -> Item:
        origin = "other_" if is_random else ""
        ids = template.ids(columns["ids"][first], columns[f"{origin}ids"][second])
        words = np.arange(len(ids))
        if self.masking.whole_words:
            second_words = columns[f"{origin}words"][second].astype(np.int64) + int(columns["words"].max()) + 1
            words = template.fill(columns["words"][first], second_words, special=0)
        types = template.types(first.stop - first.start, len(ids))
        item = self.masking.masked_item(ids, words, tokenizer, rng)
        return {**item, "types": types, "label": np.array(RANDOM if is_random else FOLLOWS)}

    def collate(self, rows: Sequence[Sequence[Item]], tokenizer: Tokenizer, length: int) -> Batch:
        items = [item for row in rows for item in row]
        sequences = [[{name: array for name, array in item.items() if name != "label"}] for item in items]
        tokens = pack(sequences, max(map(item_length, items)), tokenizer.pad or 0)
        pair_weights = (tokens.weights.sum() / len(items)).expand(len(items))
        return Batch(**tokens, labels=stack_labels(items), pair_weights=pair_weights)

    def __call__(self, model: nn.Module, batch: Batch) -> LossResult:
        return bert_pretraining(model, batch)


def bert_pretraining(model: nn.Module, batch: Batch) -> LossResult:
    """Needs tokens, targets, weights, segments and types, all (B, L); labels and pair_weights (B,)."""
    layout = padded_layout(batch.segments >= 0)  # a row is one pair, so there is one vector to classify
    outputs = model(batch.tokens, layout, batch.types, outputs=True)
    loss, count, metrics = token_loss(outputs, batch, sparse=True)
    assert outputs.pair_logits is not None, "the model has a PreTraining head"
    logits = outputs.pair_logits.to(loss.dtype)  # (B, 2)
    weights = batch.pair_weights.to(loss.dtype)
    pair_loss = (F.cross_entropy(logits, batch.labels, reduction="none") * weights).sum()
    correct = ((logits.detach().argmax(-1) == batch.labels) * weights).sum()
    return loss + pair_loss, count, metrics | {"pair_loss": pair_loss.detach(), "pair_accuracy": correct}


class PairTemplate(NamedTuple):
    """The special tokens before, between and after two segments, and the type of each part."""

    before: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]
    second_type: int

    @property
    def size(self) -> int:
        return len(self.before) + len(self.between) + len(self.after)

    def ids(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        return np.concatenate([self.before, first, self.between, second, self.after]).astype(np.int64)

    def fill(self, first: np.ndarray, second: np.ndarray, special: int) -> np.ndarray:
        """The values of two segments, with one value for the special tokens."""
        before, between, after = (np.full(len(part), special) for part in (self.before, self.between, self.after))
        return np.concatenate([before, first, between, second, after]).astype(np.int64)

    def types(self, first: int, total: int) -> np.ndarray:
        """0 for the first segment of this length and the tokens around it, the second type for the rest."""
        return np.where(np.arange(total) < len(self.before) + first + len(self.between), 0, self.second_type)


def pair_template(tokenizer: Tokenizer) -> PairTemplate:
    """The special tokens that the tokenizer adds to a pair."""
    text, before, after = tokenizer.sample_text, tokenizer.prefix_ids, tokenizer.suffix_ids
    ids, types = tokenizer.encode_with_special_tokens(text, text), tokenizer.token_type_ids(text, text)
    size = len(tokenizer.encode(text))
    first, second = len(before) + size, len(ids) - len(after) - size
    if not before or not after or second <= first:
        raise SpecError(
            "this tokenizer does not separate pairs by special tokens such as [CLS] and [SEP]; train a tokenizer "
            "(tokenizer.by='bpe'), or use that of a BERT"
        )
    return PairTemplate(before, tuple(ids[first:second]), after, types[second])


def sentence_ends(sentences: np.ndarray) -> list[int]:
    """The index after the last token of each sentence."""
    return [*(np.flatnonzero(np.diff(sentences)) + 1).tolist(), len(sentences)]
