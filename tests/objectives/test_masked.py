"""Masked language modelling: the rates of masking, and a loss over the masked tokens only."""

import math

import pytest
import torch
from torch import Tensor

from regard.data.batch import Batch
from regard.data.loader import Loader
from regard.data.sources.world import WorldStories
from regard.layout import TokenLayout
from regard.models.heads import MaskedLM
from regard.models.presets import BERT_DENSE, bert
from regard.objectives.masked import Masking, masked
from regard.objectives.next_token import NextToken
from regard.text import train as tokenizers
from regard.training.optimizer import AdamW
from regard.training.step import take_step

VOCAB, MASK, CLS = 300, 1, 2
MASKING = Masking(VOCAB, MASK, specials=(CLS,))
SMALL = {"vocab": 31, "width": 24, "heads": 4, "hidden": 40, "layers": 2, "length": 64, "dropout": 0.0}


def batch_of(tokens: Tensor, padding: Tensor | None = None) -> Batch:
    padding = torch.zeros_like(tokens, dtype=torch.bool) if padding is None else padding
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    return Batch(tokens=tokens, positions=positions.where(~padding, 0), segments=-padding.long())


def is_near_mean(count: int, total: int, rate: float) -> bool:
    """Whether a binomial count is within four standard deviations of its mean."""
    return abs(count - total * rate) < 4 * math.sqrt(total * rate * (1 - rate))


@pytest.mark.ledger("tr.mlm")
def test_tokens_are_masked_replaced_and_kept_at_their_rates() -> None:
    """12 % of all tokens are masked, 1.5 % replaced, 1.5 % selected and kept; never special tokens or padding."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, VOCAB, (100, 1000), generator=generator)
    tokens[:, 0] = CLS
    padding = torch.zeros_like(tokens, dtype=torch.bool)
    padding[:, 990:] = True
    before = batch_of(tokens, padding)
    after = MASKING.apply(before, generator)
    maskable, selected = (tokens != CLS) & ~padding, after.weights == 1
    assert torch.equal(after.targets, tokens)
    assert torch.equal(after.tokens[~selected], tokens[~selected])
    assert not selected[~maskable].any()
    total = int(maskable.sum())
    masked_out, kept = selected & (after.tokens == MASK), selected & (after.tokens == tokens)
    replaced = selected & ~masked_out & ~kept
    assert is_near_mean(int(selected.sum()), total, 0.15)
    # a random token may be [MASK], or the token itself
    assert is_near_mean(int(masked_out.sum()), total, 0.12 + 0.015 / VOCAB)
    assert is_near_mean(int(kept.sum()), total, 0.015 + 0.015 / VOCAB)
    assert is_near_mean(int(replaced.sum()), total, 0.015 * (1 - 2 / VOCAB))
    assert after.tokens[replaced].unique().numel() > 250


def test_the_seed_determines_the_masked_tokens() -> None:
    batch = batch_of(torch.randint(3, VOCAB, (4, 32)))
    first, repeated, different = (MASKING.apply(batch, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(first.tokens, repeated.tokens)
    assert not torch.equal(first.tokens, different.tokens)


def test_the_loss_is_over_the_selected_tokens() -> None:
    model = bert(**SMALL, head=MaskedLM(BERT_DENSE)).build(0).double().eval()
    padding = torch.zeros(3, 12, dtype=torch.bool)
    padding[1, 5:] = True
    batch = Masking(31, 1, share=0.4).apply(
        batch_of(torch.randint(3, 31, (3, 12)), padding), torch.Generator().manual_seed(3)
    )
    loss, count, metrics = masked(model, batch)
    log_p = model(batch.tokens, TokenLayout(batch.positions, valid=~padding)).log_softmax(-1)
    indices = [(row, t) for row in range(3) for t in range(12) if batch.weights[row, t] == 1]
    expected = -sum(log_p[row, t, batch.targets[row, t]] for row, t in indices)
    correct = sum(log_p[row, t].argmax() == batch.targets[row, t] for row, t in indices)
    assert count == len(indices) > 3
    assert abs(loss - expected) < 1e-10
    assert metrics["accuracy"] == correct


@pytest.mark.ledger("tr.mlm")
def test_the_loss_equals_that_of_bert() -> None:
    from transformers import BertConfig, BertForMaskedLM

    from tests.models.reference_weights import fill, randomized, renamed
    from tests.models.test_encoder import BERT

    config = BertConfig(
        vocab_size=31, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=40,
        max_position_embeddings=64,
    )  # fmt: skip
    theirs = randomized(BertForMaskedLM(config))
    ours = fill(bert(**SMALL, head=MaskedLM(BERT_DENSE)).build(), renamed(dict(theirs.named_parameters()), BERT))
    batch = Masking(31, 1, share=0.3).apply(batch_of(torch.randint(3, 31, (3, 12))), torch.Generator().manual_seed(3))
    loss, count, _ = masked(ours, batch)
    labels = batch.targets.where(batch.weights == 1, -100)
    expected = theirs(batch.tokens, labels=labels).loss
    assert abs(loss / count - expected) < 1e-12


def test_an_encoder_learns_to_predict_masked_tokens() -> None:
    """The data are stories of the simulated world, encoded as bytes."""
    tokenizer = tokenizers.byte()
    loader = iter(Loader(WorldStories().open().train, NextToken(), tokenizer, rows=8, length=64))
    vocab = tokenizer.vocab_size + 1
    spec = bert(vocab, 48, 4, 96, 1, 64, MaskedLM(BERT_DENSE), dropout=0.0)
    model, generator = spec.build(0), torch.Generator().manual_seed(0)
    optimizer, losses = AdamW().build(model, lr=1e-2), []
    for _ in range(30):
        batch = Masking(vocab, vocab - 1).apply(next(loader), generator)
        losses.append(take_step(model, masked, batch, optimizer, clip=1.0)["loss"])
    assert losses[0] > 5
    assert sum(losses[-5:]) / 5 < 3.5
