"""A part that is defined outside the package: registered, built, trained, saved, loaded, generated from, verified."""

from dataclasses import dataclass, field, make_dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.checkpoint import load
from regard.objectives.base import Objective
from regard.spec import REGISTERED, Spec, SpecError
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


def make_part(kind: str, hint: Any, default: Any = ()) -> type[Spec]:
    return regard.register(kind)(make_dataclass(kind, [("x", hint, default)], bases=(Spec,), frozen=True))


STORED = {
    "numbers": (tuple[tuple[int, ...], ...], ((1, 2), (3,))),
    "specs": (tuple[regard.LayerNorm, ...], (regard.LayerNorm(), regard.LayerNorm(eps=0.5))),
    "specs and numbers": (tuple[regard.LayerNorm | int, ...], (regard.LayerNorm(eps=0.5), 1, regard.LayerNorm())),
    "numbers and specs": (tuple[regard.LayerNorm | int, ...], (1, regard.LayerNorm())),
    "nested specs": (tuple[tuple[regard.Attention, ...], ...], ((regard.Attention(2, mask=regard.Window(4)),), ())),
    "delete": (tuple[str, ...], ("\x7f", "\\\x7f", '\x00\n"é')),
}


@pytest.mark.parametrize("name", STORED)
def test_fields_of_a_registered_part_round_trip_through_json_and_toml(name: str) -> None:
    hint, value = STORED[name]
    spec = make_part(f"stored {name}", hint)(value)
    assert Spec.from_json(spec.to_json()) == spec
    assert Spec.from_toml(spec.to_toml()) == Spec.from_toml(spec.to_toml(defaults=True)) == spec


def test_none_in_a_tuple_is_stored_in_json_and_refused_in_toml() -> None:
    part = make_part("optional items", tuple[int | None, ...])
    assert Spec.from_json(part((None, 1)).to_json()) == part((None, 1))
    for defaults in (False, True):
        with pytest.raises(SpecError, match=r"x\[0\] is None, and TOML has no null; use to_json"):
            part((None, 1)).to_toml(defaults)
    outer = make_part("parts and numbers", tuple[part | int, ...])
    with pytest.raises(SpecError, match=r"x\[1\]\.x\[2\] is None"):
        outer((1, part((1, 2, None)))).to_toml()


def test_fields_that_files_cannot_hold_are_refused() -> None:
    for name in ("kind", "check"):
        part = make_dataclass("Part", [(name, str, "a")], bases=(Spec,), frozen=True)
        with pytest.raises(SpecError, match=f"Part.{name}: every spec has an attribute of this name; choose another"):
            regard.register("refused")(part)
    part = make_dataclass("Part", [("x", int, field(default=3, init=False))], bases=(Spec,), frozen=True)
    with pytest.raises(SpecError, match="Part.x: a field with init=False cannot be read from a file"):
        regard.register("refused")(part)
    assert "refused" not in REGISTERED


@pytest.mark.parametrize("kind", ["", " ", 5, RunningMean], ids=repr)
def test_a_kind_must_be_a_name(kind: Any) -> None:
    with pytest.raises(ValueError, match=r"is not a name; write @regard.register\('a_name'\)"):
        regard.register(kind)


def test_a_registered_objective_is_no_part_of_a_pattern() -> None:
    @regard.register("tested_objective")
    @dataclass(frozen=True)
    class Tested(Objective):
        pass

    assert Objective.from_dict({"kind": "tested_objective"}) == Tested()
    with pytest.raises(SpecError, match="there is no mask, position, mixer or feed-forward 'tested_objective'"):
        regard.tile(regard.Block((regard.Sublayer(regard.Attention(2)),)), "tested_objective", 1)
    assert len(regard.tile(regard.Block((regard.Sublayer(regard.Attention(2)),)), "window(4)", 1)) == 1
