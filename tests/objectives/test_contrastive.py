"""Contrastive losses against loops and CLIP; they need the whole batch, and training makes pairs similar."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from regard.data.batch import Batch
from regard.models.presets import clip
from regard.objectives.contrastive import LOSSES, Contrastive
from regard.training.optimizer import AdamW
from regard.training.step import take_step

SMALL = {
    "image": 8, "patch": 4, "width": 32, "heads": 4, "layers": 1, "vocab": 16, "length": 4,
    "text_width": 32, "text_heads": 4, "dim": 16,
}  # fmt: skip


def loss_by_loop(logits: Tensor, loss: str) -> Tensor:
    size = len(logits)
    if loss == "sigmoid":
        signs = [[1.0 if i == j else -1.0 for j in range(size)] for i in range(size)]
        return sum((1 + (-signs[i][j] * logits[i, j]).exp()).log() for i in range(size) for j in range(size))
    rows = sum(logits[i].exp().sum().log() - logits[i, i] for i in range(size))
    columns = sum(logits[:, i].exp().sum().log() - logits[i, i] for i in range(size))
    return (rows + columns) / 2


@pytest.mark.parametrize("loss", LOSSES)
def test_the_loss_equals_a_loop(loss: str) -> None:
    logits = (3 * torch.randn(5, 5, dtype=torch.float64)).requires_grad_()
    matches = torch.arange(5)
    assert abs(LOSSES[loss](logits, matches) - loss_by_loop(logits, loss)) < 1e-12
    assert torch.autograd.gradcheck(lambda x: LOSSES[loss](x, matches), (logits,), fast_mode=True)


@pytest.mark.ledger("mm.clip")
def test_the_loss_equals_that_of_clip() -> None:
    from transformers.models.clip.modeling_clip import image_text_contrastive_loss

    logits = torch.randn(6, 6, dtype=torch.float64)
    assert abs(LOSSES["softmax"](logits, torch.arange(6)) / 6 - image_text_contrastive_loss(logits)) < 1e-12


def pairs(rows: int, generator: torch.Generator) -> Batch:
    """Images with one bright patch, and padded sequences whose first token names the patch."""
    patches = torch.randperm(4, generator=generator)[:rows]
    images = 0.1 * torch.randn(rows, 3, 8, 8, generator=generator)
    for row, patch in enumerate(patches.tolist()):
        images[row, :, 4 * (patch // 2) :, 4 * (patch % 2) :][:, :4, :4] += 1.0
    tokens = torch.stack([patches + 1, torch.full_like(patches, 15), torch.zeros_like(patches)], 1)
    return Batch(images=images, tokens=tokens, valid=torch.tensor([[True, True, False]]).expand(rows, -1))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.ledger("mm.clip")
def test_training_increases_the_similarity_of_pairs(loss: str) -> None:
    spec = replace(clip(**SMALL), bias=-2.0 if loss == "sigmoid" else None)
    model, generator = spec.build(0), torch.Generator().manual_seed(0)
    optimizer = AdamW().build(model, lr=3e-3)
    steps = [take_step(model, Contrastive(loss), pairs(4, generator), optimizer, clip=1.0) for _ in range(60)]
    assert sum(step["loss"] for step in steps[-5:]) < 0.5 * sum(step["loss"] for step in steps[:5])
    assert sum(step["accuracy"] for step in steps[-5:]) / 5 > 0.9


def test_a_batch_cannot_be_split_into_micro_batches() -> None:
    """Half a batch has fewer negative pairs and therefore another loss, so micro-batches are refused."""
    model, batch = clip(**SMALL).build(0), pairs(4, torch.Generator().manual_seed(0))
    whole = Contrastive()(model, batch)[0]
    halves = sum(Contrastive()(model, batch.rows(rows))[0] for rows in (slice(2), slice(2, 4)))
    assert not torch.allclose(whole, halves)
    with pytest.raises(ValueError, match="compares all rows of a batch; set accumulate=1"):
        take_step(model, Contrastive(), batch, AdamW().build(model, lr=1e-3), micro_batches=2)


def test_padding_after_the_text_does_not_change_the_loss() -> None:
    model, batch = clip(**SMALL).build(0).double(), pairs(3, torch.Generator().manual_seed(0))
    unpadded = Batch(images=batch.images.double(), tokens=batch.tokens[:, :2])
    padded = Batch(images=batch.images.double(), tokens=batch.tokens, valid=batch.valid)
    assert abs(Contrastive()(model, unpadded)[0] - Contrastive()(model, padded)[0]) < 1e-10
