"""A part that is defined outside the package: registered, built, trained, saved, loaded, generated from, verified."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.checkpoint import load
from regard.spec import REGISTERED, SpecError
from regard.verification.report import verify
from tests.training.tiny import SETTINGS, SPEC, trainer


@regard.register("tested_running_mean")  # the example in the docs has the kind running_mean
@dataclass(frozen=True)
class RunningMean(regard.Body):
    """y_t = W · mean(x_1 … x_t)"""

    mixes: ClassVar[bool] = True

    def build(self, width: int) -> nn.Module:
        return RunningMeanModule(width)

    def memory(self, width: int) -> "regard.FixedSize":
        return regard.FixedSize({"sums": (width,), "count": (1,)})

    def flops(self, width: int, tokens: int, keys: int) -> int:
        return 2 * tokens * width * width


class RunningMeanModule(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, layout: regard.TokenLayout, state: "regard.State" = regard.STATELESS) -> Tensor:
        zeros = x.new_zeros(len(x), x.shape[2])
        sums, count = state.read(layout, sums=zeros, count=zeros[:, :1])
        valid = torch.ones_like(x[..., :1]) if layout.valid is None else layout.valid.unsqueeze(-1).to(x.dtype)
        total = (x * valid).cumsum(1) + sums.to(x.dtype).unsqueeze(1)
        counts = valid.cumsum(1) + count.to(x.dtype).unsqueeze(1)
        if layout.segments is not None:
            total = sum_within_documents(x * valid, layout.segments)
            counts = sum_within_documents(valid, layout.segments)
        state.write(layout, sums=total[:, -1], count=counts[:, -1])
        return self.proj(total / counts.clamp_min(1))


def sum_within_documents(x: Tensor, segments: Tensor) -> Tensor:
    same_document = segments.unsqueeze(-1) == segments.unsqueeze(-2)
    return same_document.tril().to(x.dtype) @ x  # (B, L, L) @ (B, L, D)


@regard.register("no_state")
@dataclass(frozen=True)
class NoState(RunningMean):
    def memory(self, width: int) -> None:
        return None


def with_mixer(mixer: regard.Body) -> regard.Decoder:
    block = regard.Block((regard.Sublayer(mixer), regard.Sublayer(regard.SwiGLU(24))))
    return replace(SPEC, layers=(regard.Repeat((block,), 2),))


def test_a_registered_part_is_trained_saved_loaded_and_generated_from(tmp_path: Path) -> None:
    model = with_mixer(RunningMean()).build(seed=0)
    result = trainer(tmp_path / "run", SETTINGS, model=model).train()
    assert result.finished
    regard.save(model, tmp_path / "folder")
    loaded = load(tmp_path / "folder")
    assert loaded.spec == model.spec and loaded.spec.blocks[0].sublayers[0].body == RunningMean()
    tokens = regard.Engine(loaded).generate([1, 2, 3], regard.Sampling(max_new=5, temperature=0))
    expected = [1, 2, 3]
    for _ in range(5):
        expected.append(int(model.eval()(torch.tensor([expected]))[0, -1].argmax()))
    assert [token.id for token in tokens] == expected[3:]


def test_the_laws_hold_for_a_registered_part() -> None:
    report = verify(with_mixer(RunningMean()).build(seed=0), length=24)
    assert report.ok, report
    assert {verdict.law for verdict in report.verdicts if verdict.result == "pass"} >= {
        "cached = whole",
        "packed = separate",
    }


def test_the_pattern_language_accepts_a_registered_part() -> None:
    block = regard.Block((regard.Sublayer(regard.Attention(2)), regard.Sublayer(regard.SwiGLU(24))))
    (run,) = regard.tile(block, "tested_running_mean, full", 2)
    assert [layer.sublayers[0].body.kind for layer in run.blocks] == ["tested_running_mean", "attention"]


def test_the_engine_refuses_a_mixer_without_a_state() -> None:
    with pytest.raises(ValueError, match="no_state mixes tokens but declares no state"):
        regard.Engine(with_mixer(NoState()).build(seed=0))


def test_a_kind_is_registered_once() -> None:
    with pytest.raises(ValueError, match="kind 'attention' is taken by regard.parts.attention:Attention"):
        regard.register("attention")(RunningMean)
    with pytest.raises(TypeError, match="frozen dataclass"):
        regard.register("a_module")(nn.Linear)
    with pytest.raises(SpecError, match="import"):
        regard.Decoder.from_dict({"kind": "not_imported"})
    assert REGISTERED["tested_running_mean"] is RunningMean
