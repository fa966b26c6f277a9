"""`regard verify` and `regard.verify`: table, JSON, exit code 1 if a law is broken, errors for invalid models."""

import json
from pathlib import Path

import pytest
from torch import nn

import regard as public
from regard.checkpoint.model_folder import save
from regard.kernels.attention.mask import Full
from regard.kernels.attention.patterns.window import Window
from regard.parts.attention import Attention
from regard.parts.linear_attention import LinearAttention
from regard.parts.position.alibi import Alibi, AlibiModule
from regard.parts.position.rope import Rope
from regard.verification.laws import LAWS
from regard.verification.length import LEAST, first_effect, ineffective_masks, sufficient_length
from regard.verification.report import verify
from tests.cli.conftest import regard
from tests.laws import OTHERS, block, build, decoder

ALIBI = decoder(block(Attention(4, position=Alibi())))
HYBRID = decoder(block(LinearAttention(4)), block(Attention(4, position=Rope())))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save(build(ALIBI), tmp_path / "alibi")
    return tmp_path / "alibi"


def test_a_checkpoint_that_keeps_every_law(checkpoint: Path) -> None:
    done = regard("verify", checkpoint, "--json", "--length", 8)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["failed"] == 0 and found["length"] == 8 and [law["law"] for law in found["laws"]] == list(LAWS)
    results = {law["law"]: law["result"] for law in found["laws"]}
    assert results["packed is refused by a store"] == "refused"
    assert results["recurrent = parallel"] == "not applicable"
    assert all(law["differences"]["float64"] < 1e-9 for law in found["laws"] if law["result"] == "pass")
    assert all(law["differences"]["float32"] < 1e-5 for law in found["laws"] if law["result"] == "pass")


def test_a_broken_law_is_exit_code_one(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = AlibiModule.bias
    monkeypatch.setattr(
        AlibiModule, "bias", lambda self, layout: None if layout.positions.shape[1] == 1 else right(self, layout)
    )
    done = regard("verify", checkpoint, "--length", 8)
    assert done.exit_code == 1 and "FAIL" in done.output and "laws do not hold" in done.output


def test_a_spec_is_built_with_random_weights(tmp_path: Path) -> None:
    file = tmp_path / "hybrid.toml"
    file.write_text(HYBRID.to_toml())
    done = regard("verify", file, "--length", 8)
    assert done.exit_code == 0 and "refused, as expected" in " ".join(done.output.split())
    assert "all laws that apply hold" in done.output


def test_a_recipe_with_another_pattern(tmp_path: Path) -> None:
    small = ("--model.width=24", "--tokenizer.by=byte", "--model.layers.0.times=2", "--length", 8, "--json")
    one = regard("verify", "llama", "--pattern", "window(3), full(no_position)", *small)
    assert one.exit_code == 0 and json.loads(one.stdout)["failed"] == 0
    plain = json.loads(regard("verify", "llama", *small).stdout)
    (foreign,) = (law for law in plain["laws"] if law["law"] == "exported and imported = as it was")
    assert plain["failed"] == 0 and foreign["result"] == "pass"
    assert foreign["note"].startswith("through ") and "llama" in foreign["note"]
    assert "did you mean 'window'" in str(regard("verify", "llama", "--pattern", "windw(3)").exception)


def test_models_other_than_decoders_are_verified(tmp_path: Path) -> None:
    (tmp_path / "both.json").write_text(OTHERS["encoder-decoder"].to_json())
    found = json.loads(regard("verify", tmp_path / "both.json", "--length", 8, "--json").stdout)
    assert found["failed"] == 0
    save(build(OTHERS["interleaved images"]), tmp_path / "seeing")
    found = json.loads(regard("verify", tmp_path / "seeing", "--length", 8, "--json").stdout)
    assert {law["law"].partition(":")[0] for law in found["laws"]} >= {"vision", "decoder"} and found["failed"] == 0


def test_invalid_models_are_refused(tmp_path: Path, checkpoint: Path) -> None:
    assert "neither a file or folder nor a known name" in str(regard("verify", "nothing").exception)
    assert "cannot change it" in str(regard("verify", checkpoint, "--model.width=8").exception)
    assert "--pattern cannot change it" in str(regard("verify", checkpoint, "--pattern", "full").exception)
    (tmp_path / "rope.toml").write_text(Rope().to_toml())
    assert "kind rope, not of a model" in str(regard("verify", tmp_path / "rope.toml").exception)
    short = decoder(block(Attention(4)))
    (tmp_path / "short.json").write_text(short.to_json().replace('"width"', '"context": 3, "width"'))
    assert "too short for the laws" in str(regard("verify", tmp_path / "short.json").exception)


def test_flags_are_frozen() -> None:
    shown = regard("verify", "--help").output
    assert all(flag in shown for flag in ("--pattern", "--length", "--seed", "--device", "--json"))


def test_sequences_are_long_enough_for_the_masks() -> None:
    assert first_effect(Window(5)) == 6 and first_effect(Window(600)) == 601 and first_effect(Window(5000)) == 4097
    near, far = (decoder(block(Attention(4, mask=Window(size)))) for size in (40, 4000))
    assert sufficient_length(build(near), near) == 49 and not ineffective_masks(near, 49)
    assert sufficient_length(build(far), far) == LEAST and ineffective_masks(far, LEAST) == {Window(4000): 4009}
    full = decoder(block(Attention(4)))
    assert sufficient_length(build(full), full) == LEAST and not ineffective_masks(full, 4)
    assert Full() not in ineffective_masks(OTHERS["encoder"], 4)


def test_verify_takes_a_module_a_spec_or_a_folder(checkpoint: Path) -> None:
    for model in (build(ALIBI), ALIBI, checkpoint, str(checkpoint)):
        report = public.verify(model, length=8)
        assert report.ok and not report.failed and [verdict.law for verdict in report.verdicts] == list(LAWS)
    assert str(report).endswith("all laws that apply hold") and report.to_dict()["failed"] == 0
    windowed = public.verify(decoder(block(Attention(4, mask=Window(40)))), length=8)
    assert "masks nothing in 8 tokens; a length of 49 would test it" in str(windowed)
    with pytest.raises(ValueError, match="Linear has no spec; give a model that was built from one"):
        public.verify(nn.Linear(2, 2))
    with pytest.raises(
        ValueError, match="'minilmm' is neither a file or folder nor a known name; did you mean 'minilm'"
    ):
        public.verify("minilmm")


def test_a_report_names_the_laws_that_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    right = AlibiModule.bias
    monkeypatch.setattr(
        AlibiModule, "bias", lambda self, layout: None if layout.positions.shape[1] == 1 else right(self, layout)
    )
    report = public.verify(ALIBI, length=8)
    assert not report.ok and "cached = whole" in [verdict.law for verdict in report.failed]
    assert str(report).endswith(f"{len(report.failed)} of {len(LAWS)} laws do not hold")


def test_the_model_is_left_as_it_was() -> None:
    model = build(HYBRID)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    begun: list[tuple[str, str]] = []
    verify(model, 8, on_law=lambda law, dtype: begun.append((law, dtype)))
    assert model.state_dict().keys() == before.keys()
    assert all((model.state_dict()[name] == tensor).all() for name, tensor in before.items())
    assert begun == [(law, dtype) for dtype in ("float64", "float32") for law in LAWS]
