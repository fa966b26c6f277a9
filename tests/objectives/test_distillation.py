"""Distillation: the divergences equal TRL's in loss and gradients, in chunks too; other vocabularies are refused."""

import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import regard
from regard.checkpoint import save
from regard.models.outputs import LazyLogits
from regard.objectives.distillation import Distillation, token_divergence
from regard.spec import SpecError
from regard.text.train import byte, character
from regard.training.teacher import TaughtObjective, load_teacher, with_teacher_path
from tests.objectives.test_contract import CASES, batch_of, decoder

CPU = torch.device("cpu")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_loss_and_gradients_equal_trl(beta: float, temperature: float) -> None:
    with warnings.catch_warnings(action="ignore"):
        from trl.experimental.gkd import GKDTrainer

    hidden, weight, teacher = random(2, 7, 5), random(11, 5, seed=1), random(2, 7, 11, seed=2)
    labels = torch.zeros(2, 7, dtype=torch.int64)
    labels[0, :3] = -100
    chosen = labels != -100
    student = (hidden @ weight.T).requires_grad_()
    expected = GKDTrainer.generalized_jsd_loss(student, teacher, labels, beta, temperature, reduction="sum")
    (gradient,) = torch.autograd.grad(expected, student)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    expected_gradients = ((gradient @ weight), (gradient.flatten(0, 1).T @ hidden.flatten(0, 1)))
    for chunk_size in (None, 4):
        lazy = LazyLogits(hidden, weight, None).select(chosen)
        found = token_divergence(lazy, teacher[chosen], beta, temperature, chunk_size).sum()
        assert (found - expected).abs() < 1e-6
        for ours, theirs in zip(torch.autograd.grad(found, leaves), expected_gradients, strict=True):
            assert (ours - theirs).abs().max() < 1e-6


def test_a_student_that_equals_its_teacher_has_no_loss_but_the_ordinary_one() -> None:
    case = CASES["distillation"]
    model, batch = case.model().double().eval(), batch_of(case)
    for beta in (0.0, 0.4, 1.0):
        loss, count, metrics = TaughtObjective(Distillation(beta=beta), model)(model, batch)
        assert loss.abs() < 1e-9 and count == batch.weights.sum() and metrics["divergence"].abs() < 1e-9
    half, _, metrics = TaughtObjective(Distillation(weight=0.5), model)(model, batch)
    assert (half - 0.5 * regard.NextToken()(model, batch)[0]).abs() < 1e-9


def test_teachers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    tokenizer, other = byte(), character("abc")
    spec = decoder()
    larger = replace(spec, vocab=24)
    save(spec.build(0), tmp_path / "small")
    with pytest.raises(ValueError, match="has a vocabulary of 23 tokens, and the model one of 24; choose a teacher"):
        load_teacher(Distillation(teacher=str(tmp_path / "small")), larger, tokenizer, CPU)
    save(spec.build(0), tmp_path / "other", other)
    with pytest.raises(ValueError, match="has another vocabulary: .* choose a teacher with the model's tokenizer"):
        load_teacher(Distillation(teacher=str(tmp_path / "other")), spec, tokenizer, CPU)
    assert load_teacher(Distillation(teacher=str(tmp_path / "other")), spec, other, CPU).teacher.spec == spec
    save(CASES["classification"].model(), tmp_path / "encoder")
    with pytest.raises(ValueError, match="is no decoder; choose a model that predicts tokens"):
        load_teacher(Distillation(teacher=str(tmp_path / "encoder")), spec, tokenizer, CPU)
    started = with_teacher_path(Distillation(teacher=str(tmp_path / "other")))
    assert isinstance(started, Distillation) and load_teacher(started, spec, other, CPU)
    shutil.rmtree(tmp_path / "other")
    save(spec.build(1), tmp_path / "other", other)
    with pytest.raises(ValueError, match="are not those that the run started with; restore them"):
        load_teacher(started, spec, other, CPU)
    with pytest.raises(SpecError, match="objective.teacher is not set"):
        with_teacher_path(Distillation())
    with pytest.raises(SpecError, match=r"beta=1.5 must be in \[0, 1\]"):
        Distillation(beta=1.5)


def test_a_z_loss_without_the_ordinary_loss_is_refused() -> None:
    Distillation(weight=0.5, z_loss=1e-4)
    with pytest.raises(SpecError, match="z_loss=0.0001 belongs to the ordinary loss"):
        Distillation(z_loss=1e-4)
