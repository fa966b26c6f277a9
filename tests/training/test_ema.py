"""The moving average equals torch's, is used for evaluation, and is exact on resume."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import regard
from regard.checkpoint.atomic_folder import CheckpointError
from regard.spec import SpecError
from regard.training.ema import MovingAverage
from regard.training.run import Run
from tests.training.tiny import SETTINGS, SPEC, TOKENIZER, curve, outcome, trainer

AVERAGED = replace(SETTINGS, steps=6, save_every=2, evaluate_every=3, ema=0.9)


def test_the_average_equals_torch() -> None:
    model = SPEC.build(0)
    average, reference = MovingAverage(model, 0.9), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for _ in range(5):
        with torch.no_grad():
            for p in model.parameters():
                p += torch.randn_like(p)
        average.update()
        reference.update_parameters(model)
    for name, p in reference.module.named_parameters():
        assert torch.equal(average.average[name], p), name


def test_the_average_of_half_precision_weights_is_float32() -> None:
    model = torch.nn.Linear(2, 1, bias=False).bfloat16()
    average = MovingAverage(model, 0.999)
    with torch.no_grad():
        for value in (1.0, 2.0):
            model.weight.fill_(value)
            average.update()
    assert average.average["weight"].dtype == torch.float32
    assert average.average["weight"].tolist() == [[pytest.approx(1.001)] * 2]


def test_the_average_is_applied_in_a_context() -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    average = MovingAverage(model, 0.5)
    with average.applied():
        assert model.weight.item() != 7.0  # nothing to apply yet
    for value in (1.0, 3.0):
        model.weight.data.fill_(value)
        average.update()
    with pytest.raises(ZeroDivisionError), average.applied():
        assert model.weight.item() == 2.0
        raise ZeroDivisionError
    assert model.weight.item() == 3.0


def test_without_decay_there_is_no_average() -> None:
    average = MovingAverage(SPEC.build(0), 0.0)
    average.update()
    assert not average.average


def test_training_is_unchanged_and_evaluations_use_the_average(tmp_path: Path) -> None:
    plain, averaged = (
        trainer(tmp_path / str(s.ema), s, tokenizer=TOKENIZER) for s in (replace(AVERAGED, ema=0.0), AVERAGED)
    )
    plain.train()
    result = averaged.train()
    for first, second in zip(curve(tmp_path / "0.0"), curve(tmp_path / "0.9"), strict=True):
        assert first == second or "held_out_loss" in first and first["held_out_loss"] != second["held_out_loss"]
    last = Run.open(tmp_path / "0.9").checkpoints[0]
    weights, average = load_file(last / "model.safetensors"), load_file(last / "ema.safetensors")
    assert weights.keys() == average.keys()
    assert all(torch.equal(weights[name], p) for name, p in plain.model.named_parameters())
    llm = regard.load(tmp_path / "0.9" / "ema", device="cpu")  # where the trainer is, also on a machine with a GPU
    assert all(torch.equal(average[name], p) for name, p in llm.model.named_parameters())
    assert llm.tokenizer is not None and json.loads((last / "training.json").read_text())["step"] == 6
    run = trainer(tmp_path / "again", replace(AVERAGED, steps=1), model=llm.model)
    from regard.training.step import evaluate

    values = evaluate(llm.model.float(), run.objective, run.held_out)
    assert values["loss"] == pytest.approx(result.evaluation["held_out_loss"], rel=1e-6)
    assert not (tmp_path / "0.0" / "ema").exists()


def test_a_resumed_run_has_the_same_average(tmp_path: Path) -> None:
    trainer(tmp_path / "whole", AVERAGED).train()
    stopped = trainer(tmp_path / "resumed", AVERAGED)
    step = stopped.step

    def stop_after_five(batch, position, start):
        if position.step == 5:
            raise KeyboardInterrupt
        return step(batch, position, start)

    stopped.step = stop_after_five
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    trainer(tmp_path / "resumed", AVERAGED).train()
    assert outcome(tmp_path / "whole") == outcome(tmp_path / "resumed")
    assert "ema.safetensors" in outcome(tmp_path / "whole")["last"]
    first, second = (load_file(tmp_path / name / "ema" / "model.safetensors") for name in ("whole", "resumed"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_skipped_step_does_not_change_the_average(tmp_path: Path) -> None:
    run = trainer(tmp_path, replace(AVERAGED, steps=2, nonfinite="skip", evaluate_every=0), sample=None)
    objective, calls = run.objective, []

    def fails_once(model, batch):
        loss, count, metrics = objective(model, batch)
        calls.append(1)
        return loss * (float("nan") if len(calls) == 2 else 1.0), count, metrics

    run.objective = fails_once
    run.held_out = ()
    run.train()
    assert all(torch.equal(run.ema.average[name], p) for name, p in run.model.named_parameters())


def test_wrong_averages_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="ema=1.0 must be in"):
        replace(SETTINGS, ema=1.0)
    average = MovingAverage(SPEC.build(0), 0.5)
    average.update()
    save_file(average.average, tmp_path / "ema.safetensors")
    with pytest.raises(CheckpointError, match="average of another model"):
        MovingAverage(torch.nn.Linear(2, 2), 0.5).load(tmp_path)
