"""Classification of sequences, images and tokens, and scores of pairs: losses against loops, padding, training."""

import pytest
import torch
from torch import Tensor

from regard.data.batch import Batch
from regard.kernels.attention.mask import Full
from regard.models.encoder import Encoder
from regard.models.heads import Classification
from regard.models.presets import bert, vit
from regard.models.stack import Repeat
from regard.objectives.base import padded_layout
from regard.objectives.classification import classification
from regard.objectives.scores import relevance
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.experts import Experts
from regard.parts.feedforward import FeedForward
from regard.parts.input import Tokens
from regard.training.optimizer import AdamW
from regard.training.step import take_step

SMALL = {"vocab": 31, "width": 24, "heads": 4, "hidden": 40, "layers": 2, "length": 32, "dropout": 0.0}


def random_ids(rows: int = 4, length: int = 8, seed: int = 2) -> Tensor:
    return torch.randint(31, (rows, length), generator=torch.Generator().manual_seed(seed))


def test_loss_of_sequences_equals_a_loop_and_ignores_padding() -> None:
    model = bert(**SMALL, head=Classification(3, "mean")).build(0).double()
    tokens, labels = random_ids(), torch.tensor([0, 2, 1, 1])
    valid = torch.arange(8) < torch.tensor([[8], [3], [5], [1]])
    loss, count, metrics = classification(model, Batch(tokens=tokens, labels=labels, valid=valid))
    expected, correct = 0.0, 0
    for row in range(4):
        logits = model(tokens[row : row + 1, valid[row]])[0]
        expected -= logits.log_softmax(-1)[labels[row]]
        correct += int(logits.argmax() == labels[row])
    assert count == 4
    assert abs(loss - expected) < 1e-10
    assert metrics["accuracy"] == correct


def test_loss_of_tokens_equals_a_loop() -> None:
    model = bert(**SMALL, head=Classification(3, "none")).build(0).double()
    tokens, labels, weights = random_ids(), random_ids(seed=3) % 3, (random_ids(seed=4) % 2).double()
    loss, count, _ = classification(model, Batch(tokens=tokens, labels=labels, weights=weights))
    log_p = model(tokens).log_softmax(-1)
    expected = -sum(weights[b, t] * log_p[b, t, labels[b, t]] for b in range(4) for t in range(8))
    assert count == weights.sum()
    assert abs(loss - expected) < 1e-10


def test_loss_of_pairs_equals_its_formula() -> None:
    """A cross-encoder encodes both sequences at once and returns one score."""
    model = bert(**SMALL, head=Classification(1)).build(0).double()
    tokens, types = random_ids(), (torch.arange(8) > 3).long().expand(4, -1)
    labels = torch.tensor([0.0, 1.0, 1.0, 0.25])
    loss, count, _ = relevance(model, Batch(tokens=tokens, types=types, labels=labels))
    scores = model(tokens, types=types)[:, 0].sigmoid()
    expected = -(labels * scores.log() + (1 - labels) * (1 - scores).log()).sum()
    assert count == 4
    assert abs(loss - expected) < 1e-10
    assert not torch.allclose(scores, model(tokens)[:, 0].sigmoid())


def test_types_of_pairs_are_left_out_if_the_model_has_none() -> None:
    block = Block((Sublayer(Attention(2, mask=Full())),))
    model = Encoder(Tokens(31), 16, (Repeat((block,)),), head=Classification(1, "mean")).build(0).double()
    batch = Batch(tokens=random_ids(), types=(torch.arange(8) > 3).long().expand(4, -1), labels=torch.ones(4))
    assert relevance(model, batch)[0] == relevance(model, Batch(tokens=batch.tokens, labels=batch.labels))[0]


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_positions_of_a_padded_batch_count_valid_tokens(left: bool) -> None:
    valid = torch.tensor([[True, True, False], [True, False, False]])
    layout = padded_layout(valid.flip(-1) if left else valid)
    for row, count in enumerate((2, 1)):
        assert layout.positions[row, layout.valid[row]].tolist() == list(range(count))
    assert padded_layout(None) is None


def test_micro_batches_add_up_and_experts_add_their_loss() -> None:
    block = Block((Sublayer(Attention(2, mask=Full())), Sublayer(Experts(4, 2, FeedForward(20)))))
    model = Encoder(Tokens(31), 16, (Repeat((block,)),), head=Classification(3, "mean")).build(0).double()
    batch = Batch(tokens=random_ids(), labels=torch.tensor([0, 2, 1, 1]))
    loss, count, metrics = classification(model, batch)
    assert metrics["balance"] > 0
    model.eval()
    without_balance, _, _ = classification(model, batch)
    assert abs(loss - without_balance - metrics["balance"]) < 1e-10
    halves = [classification(model, batch.rows(rows))[0] for rows in (slice(2), slice(2, 4))]
    assert abs(sum(halves) - without_balance) < 1e-10


def bars(rows: int, generator: torch.Generator) -> Batch:
    """Noisy images with a horizontal, vertical or diagonal bar."""
    labels = torch.randint(3, (rows,), generator=generator)
    shift = torch.randint(8, (rows,), generator=generator)
    y, x = torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij")
    line = torch.stack([y.expand(rows, 8, 8), x.expand(rows, 8, 8), (x + y).expand(rows, 8, 8) % 8])
    bar = line[labels, torch.arange(rows)] == shift.view(-1, 1, 1)
    noise = 0.2 * torch.randn(rows, 3, 8, 8, generator=generator)
    return Batch(images=bar.unsqueeze(1).float() + noise, labels=labels)


def test_a_vision_transformer_learns_directions_of_bars() -> None:
    model, generator = vit(8, 2, 32, 4, 64, 2, 3).build(0), torch.Generator().manual_seed(0)
    optimizer = AdamW().build(model, lr=3e-3)
    steps = [
        take_step(model, classification, bars(32, generator), optimizer, clip=1.0, micro_batches=2) for _ in range(80)
    ]
    assert steps[0]["loss"] > 0.9
    assert sum(step["accuracy"] for step in steps[-5:]) / 5 > 0.9


@pytest.mark.ledger("enc.classify")
@pytest.mark.parametrize("frozen", [False, True], ids=["tuned", "frozen"])
def test_an_encoder_learns_labels(frozen: bool) -> None:
    """The label is the more frequent of two tokens; all weights are trained, or only the head."""
    model, generator = bert(**SMALL, head=Classification(2, "mean")).build(0), torch.Generator().manual_seed(0)
    if frozen:
        model.requires_grad_(False).head.requires_grad_(True)
    optimizer, steps = AdamW().build(model, lr=3e-3 if not frozen else 3e-2), []
    for _ in range(80):
        tokens = torch.randint(2, (32, 9), generator=generator)
        batch = Batch(tokens=tokens, labels=(tokens.sum(-1) > 4).long())
        steps.append(take_step(model, classification, batch, optimizer, clip=1.0))
    assert sum(step["accuracy"] for step in steps[-5:]) / 5 > 0.9
