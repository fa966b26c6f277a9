"""Precision and compilation are choices of the moment: refused or given up with a reason, never silently."""

import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from regard.models.stack import Repeat
from regard.training.runtime import autocast, compiled
from tests.training.tiny import SETTINGS, SPEC, curve, trainer

CPU = torch.device("cpu")


def test_the_cpu_stays_in_float32() -> None:
    assert autocast("auto", CPU) is autocast("float32", CPU) is nullcontext
    with pytest.raises(ValueError, match="needs a CUDA device"):
        autocast("bfloat16", CPU)


def test_cuda_is_autocast() -> None:
    assert autocast("float32", torch.device("cuda")) is nullcontext
    assert autocast("auto", torch.device("cuda")).keywords == {"dtype": torch.bfloat16}


def test_without_a_compiler_it_goes_on_and_says_so_once(monkeypatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    said, model = [], SPEC.build(0)
    assert compiled(model, CPU, said.append) is model
    assert len(said) == 1 and "C++ compiler" in said[0]


@pytest.mark.slow
@pytest.mark.oldest
@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
@pytest.mark.filterwarnings("default")  # what torch's own compiler says about itself
def test_compiled_learns_the_same(tmp_path: Path) -> None:
    settings = replace(SETTINGS, steps=3)
    block = replace(SPEC.layers[0].blocks[0], dropout=0.0)
    plain = replace(SPEC, layers=(Repeat((block,)),))
    trainer(tmp_path / "eager", settings, model=plain.build(0), sample=None).train()
    trainer(tmp_path / "compiled", replace(settings, compile=True), model=plain.build(0), sample=None).train()
    eager, fast = (
        [line["loss"] for line in curve(tmp_path / name) if "loss" in line] for name in ("eager", "compiled")
    )
    assert fast == pytest.approx(eager, rel=1e-4)
