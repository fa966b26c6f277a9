"""Training with prefetched batches: the run, its checkpoints and its errors are those of a run without."""

import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from regard import train
from regard.data.file_index import FileError
from regard.spec import SpecError
from regard.training.data_settings import Data
from regard.training.recipe import find_recipe, read_recipe, resolve
from regard.training.run import Run, read_training
from tests.training.tiny import SETTINGS, loader, outcome, trainer

TINY = {
    "train.steps": 4, "train.save_every": 1, "train.keep": 9, "train.evaluate_every": 0, "train.accumulate": 2,
    "model.width": 48, "data.rows": 2, "data.length": 16, "data.held_out": 1, "tokenizer.by": "byte",
}  # fmt: skip


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def call_before_step(training: Any, number: int, action: Callable[[], Any]) -> None:
    step = training.step

    def wrapped(batch, position, start):
        if position.step + 1 == number:
            action()
        return step(batch, position, start)

    training.step = wrapped


@pytest.mark.parametrize("depth", [1, 5])
def test_a_run_and_its_checkpoints_do_not_depend_on_prefetching(tmp_path: Path, depth: int) -> None:
    settings = replace(SETTINGS, save_every=1, keep=20, accumulate=2)
    for name, prefetch in (("plain", 0), ("prefetched", depth)):
        training = trainer(tmp_path / name, settings, prefetch=prefetch)
        threads = []
        call_before_step(training, 3, lambda threads=threads: threads.extend(prefetch_threads()))
        training.train()
        assert len(threads) == (prefetch > 0) and not prefetch_threads()
    assert outcome(tmp_path / "prefetched") == outcome(tmp_path / "plain")
    pairs = zip(*(Run.open(tmp_path / name).checkpoints for name in ("plain", "prefetched")), strict=True)
    for plain, prefetched in pairs:
        assert read_training(plain)["loader"] == read_training(prefetched)["loader"]


def test_a_loader_that_trained_is_at_the_next_batch(tmp_path: Path) -> None:
    training, plain = trainer(tmp_path, prefetch=3), loader()
    training.train()
    for _ in range(SETTINGS.steps):
        next(plain)
    assert training.loader.state_dict() == plain.state_dict()


def test_a_run_from_a_recipe_prefetches_and_resumes_exactly_with_another_depth(tmp_path: Path) -> None:
    for name, options in (("whole", {"data.prefetch": 0}), ("resumed", {"train.steps": 2, "data.prefetch": 2})):
        train("demo", tmp_path / name, TINY | options, device="cpu")
    train(resume=tmp_path / "resumed", overrides={"train.steps": 4}, extend=True, device="cpu")
    whole, resumed = (read_training(Run.open(tmp_path / name).checkpoints[0]) for name in ("whole", "resumed"))
    assert whole["loader"] == resumed["loader"] and whole["tokens"] == resumed["tokens"]
    assert Run.open(tmp_path / "resumed").config["data"]["prefetch"] == 2


@pytest.mark.parametrize(
    ("prefetch", "device", "depth"), [(None, "cpu", 0), (None, "cuda", 2), (3, "cpu", 3), (0, "cuda", 0)]
)
def test_batches_are_made_in_advance_on_gpus_by_default(
    tmp_path: Path, prefetch: int | None, device: str, depth: int
) -> None:
    assert Data().prefetch is None
    training = trainer(tmp_path / "run", prefetch=prefetch)
    training.device = torch.device(device)
    assert training.prefetch_depth == depth


class Failing:
    """A loader that fails at a batch, and whose state cannot be restored afterwards."""

    def __init__(self, error: Exception, at: int):
        self.loader, self.error, self.left = loader(), error, at

    def __iter__(self):
        return self

    def __next__(self):
        self.left -= 1
        if self.left < 0:
            raise self.error
        return next(self.loader)

    def state_dict(self):
        return self.loader.state_dict()

    def load_state_dict(self, state):
        assert self.left >= 0, "an error hides the first one"
        self.loader.load_state_dict(state)


def test_an_error_of_the_loader_stops_the_run_at_its_batch(tmp_path: Path) -> None:
    error = FileError("chats.jsonl, line 7: not valid JSON")
    steps: list[int] = []
    training = trainer(tmp_path, loader=Failing(error, at=6), prefetch=4)
    training.listener.stepped = lambda record: steps.append(record["step"])
    with pytest.raises(FileError) as caught:
        training.train()
    assert caught.value is error and steps == [1, 2, 3, 4, 5, 6]
    assert not prefetch_threads()


@pytest.mark.parametrize("prefetch", [0, 4])
def test_an_error_of_the_loader_loses_no_step(tmp_path: Path, prefetch: int) -> None:
    training = trainer(tmp_path / "failed", loader=Failing(FileError("was changed"), at=5), prefetch=prefetch)
    with pytest.raises(FileError, match="was changed"):
        training.train()
    assert Run.open(tmp_path / "failed").step == 5
    trainer(tmp_path / "failed").train()
    trainer(tmp_path / "whole").train()
    assert outcome(tmp_path / "failed") == outcome(tmp_path / "whole")


def test_signals_leave_no_thread(tmp_path: Path) -> None:
    stopped = trainer(tmp_path / "stopped")
    call_before_step(stopped, 4, lambda: signal.raise_signal(signal.SIGINT))
    assert stopped.train().step == 4 and not prefetch_threads()
    aborted = trainer(tmp_path / "aborted")
    call_before_step(aborted, 4, lambda: [signal.raise_signal(signal.SIGTERM) for _ in range(2)])
    with pytest.raises(KeyboardInterrupt):
        aborted.train()
    assert not prefetch_threads()
    for name in ("stopped", "aborted"):
        trainer(tmp_path / name).train()
    trainer(tmp_path / "whole", prefetch=0).train()
    assert outcome(tmp_path / "stopped")["curve"] == outcome(tmp_path / "aborted")["curve"]
    assert outcome(tmp_path / "stopped")["curve"] == outcome(tmp_path / "whole")["curve"]


def test_a_negative_depth_is_refused() -> None:
    with pytest.raises(SpecError, match="prefetch=-1 must not be negative"):
        resolve(read_recipe(find_recipe("demo"), {"data.prefetch": -1}))
