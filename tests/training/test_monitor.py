"""Monitors: their values against plain computations, and a trajectory that they do not change."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from regard.lens.hooks import record
from regard.lens.maps import entropy, named_attention_maps
from regard.objectives.base import layout_of
from regard.objectives.next_token import next_token
from regard.training.monitor import gradient_norms, measure_activations
from tests.training.tiny import SETTINGS, SPEC, curve, loader, outcome, trainer

ATTENTION = "stack.blocks.0.sublayers.0.body"


def test_monitors_do_not_change_training(tmp_path: Path) -> None:
    trainer(tmp_path / "without").train()
    trainer(tmp_path / "with", replace(SETTINGS, monitor_every=2)).train()
    without, monitored = outcome(tmp_path / "without"), outcome(tmp_path / "with")
    assert without["last"] == monitored["last"] and without["samples"] == monitored["samples"]
    names = {name for line in curve(tmp_path / "with") if line["step"] == 4 for name in line if "/" in name}
    layers = ("stack.blocks.0", "stack.blocks.1")
    assert names == {
        *(f"grad_norm/{name}" for name in (*layers, "embedding", "norm")),
        *(f"largest_activation/{name}" for name in layers),
        f"attention_entropy/{ATTENTION}",
    }
    plain = [{k: v for k, v in line.items() if "/" not in k} for line in curve(tmp_path / "with")]
    assert plain == without["curve"]


def test_the_norms_of_the_layers_add_up_to_that_of_the_gradient() -> None:
    model, batch = SPEC.build(0).eval(), next(iter(loader()))
    loss, count, _ = next_token(model, batch)
    loss.backward()
    norms = gradient_norms(model, float(count))
    total = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]) / count
    assert math.hypot(*norms.values()) == pytest.approx(float(total), rel=1e-5)


def test_activations_and_entropies_equal_those_of_the_lens() -> None:
    model, batch = SPEC.build(0), next(iter(loader()))
    model.train()
    values = measure_activations(model, next_token, batch, torch.no_grad)
    assert model.training
    model.eval()
    row = batch.rows(slice(0, 1))
    assert (row.segments >= 0).all()  # without padding every query counts
    with record(model, "stack.blocks.*") as outputs, torch.no_grad():
        maps = named_attention_maps(model, row.tokens, layout_of(row))
    assert values["largest_activation/stack.blocks.1"] == float(outputs["stack.blocks.1"].abs().max())
    assert values[f"attention_entropy/{ATTENTION}"] == pytest.approx(float(entropy(maps[ATTENTION]).mean()), rel=1e-6)
