"""Two models on the same text: perplexity of each, and how far their next-token distributions agree.

    perplexity             exp(mean of -ln p(token))
    perplexity per byte    exp(-Σ ln p(token) / bytes of these tokens): for models whose tokenizers differ
    equal tokens           the share of places where both models find the same token most likely
    KL                     mean of Σ p_A ln(p_A / p_B), in nats

The text is read in rows of a fixed number of tokens, each from its own start; the first token of a row counts only if
the tokenizer begins every string with special ids. Smaller caches are read in chunks, as an engine reads a prompt.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from regard.engine.caches import checked_cache
from regard.evals.cached_loss import cached_logits
from regard.models.decoder import DecoderModule
from regard.text.tokenizer import Tokenizer

CHUNK = 256  # tokens of one forward
Piece = tuple[Tensor, Tensor]  # log-probabilities (n, V), and the tokens (n,)


class ComparedModel(NamedTuple):
    model: DecoderModule
    tokenizer: Tokenizer
    cache: str | None = None


class TextRow(NamedTuple):
    ids: list[int]
    first: int  # the first of them that is predicted
    bytes: int  # of the predicted tokens


@dataclass
class TextLoss:
    tokens: int = 0
    bytes: int = 0
    nats: float = 0.0

    @property
    def finite(self) -> bool:
        """Whether the logits were: one that is NaN or infinite makes all probabilities of its token NaN."""
        return not math.isnan(self.nats)

    @property
    def perplexity(self) -> float | None:
        """None if there are no tokens, or if the logits are not finite."""
        return math.exp(min(self.nats / self.tokens, 700)) if self.tokens and self.finite else None

    @property
    def perplexity_per_byte(self) -> float | None:
        return math.exp(min(self.nats / self.bytes, 700)) if self.tokens and self.finite else None


@dataclass
class TokenAgreement:
    tokens: int = 0
    equal: int = 0
    nats: float = 0.0

    @property
    def share(self) -> float:
        return self.equal / self.tokens

    @property
    def divergence(self) -> float:
        return self.nats / self.tokens


def read_both(
    first: ComparedModel,
    second: ComparedModel,
    rows: tuple[list[TextRow], list[TextRow]],
    on_progress: Callable[[int], object] = lambda done: None,
) -> tuple[TextLoss, TextLoss, TokenAgreement | None]:
    """The losses of both models; no agreement if their tokenizers differ, or if it cannot be measured.

    rows: `fixed_rows` of the tokenizer of each. on_progress: called with the number of rows that are read.
    """
    losses, found, done = (TextLoss(), TextLoss()), TokenAgreement(), 0
    if same := same_tokens(first.tokenizer, second.tokenizer):
        vocab = min(first.model.spec.vocab, second.model.spec.vocab)  # one embedding may be padded
        for row in rows[0]:
            for (p, targets), (q, _) in aligned(logprobs(first, row, vocab), logprobs(second, row, vocab)):
                count(losses[0], p, targets)
                count(losses[1], q, targets)
                compare(found, p, q)
            on_progress(done := done + 2)
    else:
        for one, own, loss in zip((first, second), rows, losses, strict=True):
            for row in own:
                for p, targets in logprobs(one, row, one.model.spec.vocab):
                    count(loss, p, targets)
                on_progress(done := done + 1)
    for own, loss in zip(rows, losses, strict=True):
        loss.bytes = sum(row.bytes for row in own)
    measured = same and found.tokens > 0 and all(loss.finite for loss in losses)
    return *losses, found if measured else None


def aligned(first: Iterator[Piece], second: Iterator[Piece]) -> Iterator[tuple[Piece, Piece]]:
    """Pieces of the same tokens of two iterators whose pieces may have different lengths."""
    left, right = next(first, None), next(second, None)
    while left is not None and right is not None:
        n = min(len(left[1]), len(right[1]))
        yield (left[0][:n], left[1][:n]), (right[0][:n], right[1][:n])
        left = (left[0][n:], left[1][n:]) if len(left[1]) > n else next(first, None)
        right = (right[0][n:], right[1][n:]) if len(right[1]) > n else next(second, None)
    assert left is None and right is None, "both iterators have the same tokens"


def same_tokens(first: Tokenizer, second: Tokenizer) -> bool:
    """Whether two tokenizers have the same ids, and begin a text with the same ones."""
    vocabularies = [one.core.get_vocab(with_added_tokens=True) for one in (first, second)]
    return vocabularies[0] == vocabularies[1] and first.prefix_ids == second.prefix_ids


def fixed_rows(tokenizer: Tokenizer, text: str, length: int) -> list[TextRow]:
    """The text in rows of `length` ids, special ids included; none if it has too few tokens."""
    ids, starts = tokenizer.encode_with_starts(text)
    prefix, rows = list(tokenizer.prefix_ids), []
    first, size = max(1, len(prefix)), length - len(prefix)
    for start in range(0, len(ids), size):
        row, stop = prefix + ids[start : start + size], start + size
        if len(row) > first:
            begin = starts[start + first - len(prefix)]
            end = starts[stop] if stop < len(ids) else len(text)
            rows.append(TextRow(row, first, len(text[begin:end].encode())))
    return rows


@torch.inference_mode()
def logprobs(one: ComparedModel, row: TextRow, vocab: int) -> Iterator[Piece]:
    """Pieces of log-probabilities (n, V) of the predicted tokens of a row, among the first `vocab` ids, and the tokens.

    A cache that evicts after the prompt takes the first half of a row for it.
    """
    ids = torch.tensor([row.ids], device=next(one.model.parameters()).device)
    chunk, read = min(CHUNK, checked_cache(one.cache, one.model.spec).max_chunk), 0
    for logits in cached_logits(one.model, ids, one.cache, chunk, prompt=max(1, len(row.ids) // 2)):
        skip, stop = max(0, row.first - 1 - read), read + 1 + logits.shape[1]
        p = logits[0, skip:, :vocab]
        yield p.to(torch.promote_types(p.dtype, torch.float32)).log_softmax(-1), ids[0, read + 1 + skip : stop]
        read += logits.shape[1]


def count(loss: TextLoss, p: Tensor, targets: Tensor) -> None:
    loss.tokens += len(targets)
    loss.nats -= p.gather(-1, targets.unsqueeze(-1)).sum().item()


def compare(found: TokenAgreement, p: Tensor, q: Tensor) -> None:
    found.tokens += len(p)
    found.equal += int((p.argmax(-1) == q.argmax(-1)).sum())
    found.nats += ((p - q).where(p.isfinite(), 0) * p.exp()).sum().item()
