"""Objectives whose steps train different parameters: what is frozen stays bitwise unchanged, and a run resumes so."""

import shutil
from pathlib import Path

import pytest
import torch

import regard
from regard.data.loader import Loader
from regard.data.sources.points import PlanePoints
from regard.models.generative.base import MLP
from regard.models.generative.gan import GAN
from regard.training.loop import Trainer
from regard.training.optimizer import AdamW, optimizer_state
from regard.training.recipe import Training
from regard.training.run import Run
from regard.training.schedule import Constant
from tests.cli.conftest import regard as command
from tests.cli.test_pairs import write_recipe
from tests.training.tiny import TOKENIZER, outcome

MODEL = GAN((2,), 3, generator=MLP((8,)), discriminator=MLP((8,)))
SETTINGS = Training(
    steps=9, lr=1e-2, schedule=Constant(warmup=0), optimizer=AdamW(weight_decay=0.1), save_every=2, keep=9, ema=0.5
)


def trainer(path: Path, settings: Training = SETTINGS, loss: str = "non_saturating") -> Trainer:
    run = Run.open(path) if (path / "config.json").exists() else Run.create(path, {"train": settings.to_dict()})
    objective = regard.Adversarial(loss=loss, critic_steps=2).fit(PlanePoints().open(), MODEL)
    loader = Loader(PlanePoints().open().train, objective, TOKENIZER, rows=8, length=1)
    return Trainer(MODEL.build(0), loader, objective, settings, run)


def state_of(trained: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trained.model.named_parameters()} | {
        name: value.clone() for name, value in optimizer_state(trained.optimizer).items()
    }


@pytest.mark.ledger("gan.alternate")
@pytest.mark.parametrize("loss", ["saturating", "non_saturating", "wasserstein"])
def test_the_frozen_network_keeps_its_weights_and_moments(tmp_path: Path, loss: str) -> None:
    trained = trainer(tmp_path / "run", loss=loss)
    states, step = [], trained.step

    def record(*arguments):
        states.append(state_of(trained))
        return step(*arguments)

    trained.step = record  # ty: ignore[invalid-assignment]
    trained.train()
    states.append(state_of(trained))
    for number, (before, after) in enumerate(zip(states, states[1:], strict=False)):
        phase = "generator." if number % 3 == 2 else "discriminator."
        changed = {name for name in after if name not in before or not torch.equal(before[name], after[name])}
        trained_weights = {name for name in after if name.startswith(phase) and name.endswith("weight")}
        assert trained_weights <= changed, number  # the bias of a critic has no gradient
        assert all(name.startswith(phase) for name in changed), number
    assert all(parameter.requires_grad for parameter in trained.model.parameters())


@pytest.mark.ledger("gan.alternate")
@pytest.mark.parametrize("step", [2, 4, 6, 8])
def test_a_run_stopped_in_any_phase_resumes_exactly(tmp_path: Path, step: int) -> None:
    trainer(tmp_path / "whole").train()
    shutil.copytree(tmp_path / "whole", tmp_path / "stopped")
    for folder in Run.open(tmp_path / "stopped").checkpoints:
        if int(folder.name.removeprefix("step-")) > step:
            shutil.rmtree(folder)
    trainer(tmp_path / "stopped").train()
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "whole")


def test_frozen_patterns_of_the_recipe_stay_frozen(tmp_path: Path) -> None:
    settings = regard.Training(**{**vars(SETTINGS), "freeze": ("generator.out.*",)})
    trained = trainer(tmp_path / "run", settings)
    before = {name: value.clone() for name, value in trained.model.named_parameters()}
    trained.train()
    changed = {name for name, value in trained.model.named_parameters() if not torch.equal(before[name], value)}
    assert changed == {name for name in before if not name.startswith("generator.out.")}
    assert not trained.model.generator.out.weight.requires_grad


def test_several_processes_and_the_search_for_a_rate_are_refused(tmp_path: Path, monkeypatch) -> None:
    recipe = write_recipe("GAN", "gan", tmp_path)
    result = command("lr-find", recipe)
    assert result.exit_code == 2 and "do not show a rate" in " ".join(result.output.split())
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = command("train", recipe, "--out", tmp_path / "run")
    assert "objective gan freezes a part of the model in each step; use one process" in str(result.exception)
