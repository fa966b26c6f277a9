"""Warm-up of the length: rows are cut into shorter ones, every token is trained once, and the loss is exact."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from regard.data.batch import Batch
from regard.objectives.next_token import next_token
from regard.spec import SpecError
from regard.training.recipe import Training, find_recipe, read_recipe, resolve
from regard.training.step import cut_rows
from tests.training.tiny import SETTINGS, SPEC, loader, outcome, trainer


def test_rows_have_eighths_quarters_and_halves_of_the_length_for_a_third_of_the_steps_each() -> None:
    assert [Training(steps=20, length_warmup=9).row_parts(k) for k in range(11)] == [8] * 3 + [4] * 3 + [2] * 3 + [
        1
    ] * 2
    assert [Training(steps=20, length_warmup=1).row_parts(k) for k in range(2)] == [8, 1]
    assert Training(steps=20).row_parts(0) == 1


@torch.no_grad()
def test_a_cut_batch_has_the_losses_of_its_parts() -> None:
    batch, model = next(loader()), SPEC.build(0).double().eval()
    batch = Batch(**{name: t.double() if t.is_floating_point() else t for name, t in batch.items()})
    cut = cut_rows(batch, 4)
    assert cut.tokens.shape == (16, 6) and cut.token_count == batch.token_count
    assert torch.equal(cut.tokens[1], batch.tokens[0, 6:12]) and torch.equal(cut.positions[1], batch.positions[0, 6:12])
    loss, count, _ = next_token(model, cut)
    columns = [Batch(**{name: t[:, i : i + 6] for name, t in batch.items()}) for i in range(0, 24, 6)]
    parts = [next_token(model, column) for column in columns]
    assert float(loss) == pytest.approx(sum(float(part[0]) for part in parts), abs=1e-9)
    assert float(count) == sum(float(part[1]) for part in parts) == float(next_token(model, batch)[1])
    assert cut_rows(batch, 1) is batch


@pytest.mark.ledger("long.progressive")
def test_training_with_a_length_warmup_resumes_exactly(tmp_path: Path) -> None:
    settings = replace(SETTINGS, steps=5, save_every=2, length_warmup=3, accumulate=2)
    trainer(tmp_path / "whole", settings).train()
    stopped = trainer(tmp_path / "resumed", settings)
    step = stopped.step

    def stop_after_three(batch, position, start):
        if position.step == 3:
            raise KeyboardInterrupt
        return step(batch, position, start)

    stopped.step = stop_after_three
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    trainer(tmp_path / "resumed", settings).train()
    assert outcome(tmp_path / "whole")["curve"] == outcome(tmp_path / "resumed")["curve"]


def test_rows_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot cut rows into 8 parts"):
        cut_rows(Batch(tokens=torch.zeros(2, 12)), 8)
    with pytest.raises(ValueError, match="cannot cut rows"):
        cut_rows(Batch(tokens=torch.zeros(2, 16), labels=torch.zeros(2)), 8)
    with pytest.raises(SpecError, match="data.length=100 has no such rows"):
        resolve(read_recipe(find_recipe("demo"), {"train.length_warmup": 5, "data.length": 100}))
