"""Every pair of a kind of model and an objective: trained, resumed, loaded and exported, or refused by name."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.checkpoint.model_folder import load as load_folder
from regard.data.loader import Loader
from regard.families.common.config_reader import FamilyError
from regard.kinds import KINDS, OBJECTIVES
from regard.models.base import Model
from regard.models.heads import Head
from regard.objectives.distillation import Distillation
from regard.objectives.reinforcement import Reinforcement
from regard.parts.input import Input
from regard.reinforcement_run import EngineGenerator
from regard.spec import Spec, class_of, toml_lines
from regard.training.recipe import Recipe
from regard.training.reference import ReferenceTable
from regard.training.rewards import load_reward
from regard.training.rollouts import HeldOutRewards, RolloutLoader, Scorer
from regard.training.run import Run
from regard.training.start import build_model
from regard.training.step import evaluate
from regard.training.teacher import load_teacher
from regard.verification.length import nested_specs
from tests.cli import pairs
from tests.cli.conftest import regard as command
from tests.training.tiny import curve


def write_recipe(row: str, kind: str, folder: Path, **tables: Any) -> Path:
    file = folder / "recipe.toml"
    file.write_text("\n".join(toml_lines({**pairs.recipe(row, kind, folder), **tables})), encoding="utf-8")
    return file


def run_command(*arguments: object) -> None:
    result = command(*arguments)
    assert result.exit_code == 0, result.exception or result.output


def held_out_loss(model: torch.nn.Module, run: Path) -> float:
    """The loss of a model on the held-out examples of a run."""
    recipe = Recipe.from_dict(Run.open(run).config)
    data, objective = recipe.data, recipe.objective
    assert objective is not None
    examples, tokenizer = data.open().held_out, regard.Tokenizer.load(run / "tokenizer")
    assert examples is not None
    loader = Loader(examples, objective, tokenizer, data.rows, data.length, data.seed)
    batches = loader.without_repetition(data.held_out)
    if isinstance(objective, Reinforcement):
        requests = data.rows * objective.updates
        generate = EngineGenerator(model, tokenizer, data.length, objective.max_new, requests)
        score, reward = Scorer(model), load_reward(objective.reward)
        rollouts = RolloutLoader(examples, objective, tokenizer, data.rows, data.length, generate, reward, score, score)
        batches = HeldOutRewards(rollouts, examples, data.held_out * data.rows)
    if objective.needs_reference:
        batches = map(ReferenceTable(lambda: build_model(recipe)).add_to, batches)
    if isinstance(objective, Distillation):
        taught = load_teacher(objective, recipe.model, tokenizer, torch.device("cpu"))
        return evaluate(model, taught, batches)["loss"]
    return evaluate(model, objective, batches)["loss"]


def last_checkpoint(run: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in Run.open(run).checkpoint(4).iterdir()}


@pytest.mark.parametrize(("row", "kind"), pairs.TRAINED)
def test_a_pair_is_trained_resumed_loaded_and_exported(row: str, kind: str, tmp_path: Path) -> None:
    run, stopped, exported = tmp_path / "run", tmp_path / "stopped", tmp_path / "exported"
    run_command("train", write_recipe(row, kind, tmp_path), "--out", run)
    shutil.copytree(run, stopped)
    shutil.rmtree(Run.open(stopped).checkpoint(4))  # as if it had been killed after step 2
    run_command("train", "--resume", stopped)
    assert last_checkpoint(stopped) == last_checkpoint(run)
    assert curve(stopped) == curve(run)
    loaded = regard.load(run, "cpu")
    expected = curve(run)[-1]["held_out_loss"]
    assert held_out_loss(loaded.model, run) == expected
    if pairs.family_of(row) is None:
        result = command("export", run, exported)
        kind, message = pairs.spec(row).kind, str(result.exception)
        assert isinstance(result.exception, FamilyError)
        assert f"no family can express this {kind}" in message or f"no family has models of the kind {kind}" in message
        assert not exported.exists()
    else:
        run_command("export", run, exported)
        assert abs(held_out_loss(load_folder(exported), run) - expected) < 1e-5


@pytest.mark.parametrize("row", pairs.MODELS)
def test_other_pairs_are_refused_by_name_before_data_are_read(row: str, tmp_path: Path) -> None:
    kinds = [kind for refused, kind in pairs.REFUSED if refused == row]
    for kind in kinds:
        missing = {"data": {"path": str(tmp_path / "missing.jsonl")}}
        result = command("train", write_recipe(row, kind, tmp_path, **missing), "--out", tmp_path / "run")
        message = str(result.exception)
        assert f"objective {kind} trains" in message and pairs.spec(row).kind in message, message
        assert "; set objective.kind" in message or "; give it" in message
        assert not (tmp_path / "run").exists()


def test_every_kind_of_model_head_input_and_objective_is_in_the_table() -> None:
    def kinds(base: type[Spec]) -> set[str]:
        return {kind for kind in KINDS if issubclass(class_of(kind, "kind"), base)}

    used = {part.kind for row in pairs.MODELS for part in [pairs.spec(row), *nested_specs(pairs.spec(row))]}
    drafters = {"medusa", "eagle"}  # trained by `regard speculate train`
    assert (kinds(Model) - drafters) | kinds(Head) | kinds(Input) <= used
    assert {kind for _, kind in pairs.TRAINED} == OBJECTIVES.keys()


def test_the_page_is_current() -> None:
    assert pairs.PAGE.read_text(encoding="utf-8") == pairs.page(), "run python -m tests.cli.pairs"
