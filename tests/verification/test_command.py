"""`regard verify` and `regard.verify`: table, JSON, exit code 1 if a law is broken, and errors for invalid models."""

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
from regard.parts.position.alibi import Alibi
from regard.parts.position.rope import Rope
from regard.verification.laws import LAWS
from regard.verification.length import MIN_LENGTH, first_effect, ineffective_masks, sufficient_length
from regard.verification.report import verify
from tests.cli.conftest import regard
from tests.laws import OTHERS, block, build, decoder
from tests.verification.test_faults import omit_bias_when_decoding

ALIBI = decoder(block(Attention(4, position=Alibi())))
HYBRID = decoder(block(LinearAttention(4)), block(Attention(4, position=Rope())))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save(build(ALIBI), tmp_path / "alibi")
    return tmp_path / "alibi"


def test_verify_passes_for_a_correct_checkpoint(checkpoint: Path) -> None:
    result = regard("verify", checkpoint, "--json", "--length", 8)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["failed"] == 0 and report["length"] == 8 and [law["law"] for law in report["laws"]] == list(LAWS)
    results = {law["law"]: law["result"] for law in report["laws"]}
    assert results["packed is refused by a store"] == "refused"
    assert results["recurrent = parallel"] == "not applicable"
    assert all(law["differences"]["float64"] < 1e-9 for law in report["laws"] if law["result"] == "pass")
    assert all(law["differences"]["float32"] < 1e-5 for law in report["laws"] if law["result"] == "pass")


def test_a_broken_law_exits_with_code_one(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    omit_bias_when_decoding(monkeypatch)
    result = regard("verify", checkpoint, "--length", 8)
    assert result.exit_code == 1 and "FAIL" in result.output and "laws do not hold" in result.output


def test_a_spec_file_is_verified_with_random_weights(tmp_path: Path) -> None:
    file = tmp_path / "hybrid.toml"
    file.write_text(HYBRID.to_toml())
    result = regard("verify", file, "--length", 8)
    assert result.exit_code == 0 and "refused, as expected" in " ".join(result.output.split())
    assert "all laws that apply hold" in result.output


def test_a_recipe_is_verified_with_and_without_a_pattern(tmp_path: Path) -> None:
    flags = ("--model.width=24", "--tokenizer.by=byte", "--model.layers.0.times=2", "--length", 8, "--json")
    with_pattern = regard("verify", "llama", "--pattern", "window(3), full(no_position)", *flags)
    assert with_pattern.exit_code == 0 and json.loads(with_pattern.stdout)["failed"] == 0
    report = json.loads(regard("verify", "llama", *flags).stdout)
    (round_trip,) = (law for law in report["laws"] if law["law"] == "exported and imported = original")
    assert report["failed"] == 0 and round_trip["result"] == "pass"
    assert round_trip["note"].startswith("through ") and "llama" in round_trip["note"]
    assert "did you mean 'window'" in str(regard("verify", "llama", "--pattern", "windw(3)").exception)


def test_models_other_than_decoders_are_verified(tmp_path: Path) -> None:
    (tmp_path / "encoder_decoder.json").write_text(OTHERS["encoder-decoder"].to_json())
    report = json.loads(regard("verify", tmp_path / "encoder_decoder.json", "--length", 8, "--json").stdout)
    assert report["failed"] == 0
    save(build(OTHERS["interleaved images"]), tmp_path / "images")
    report = json.loads(regard("verify", tmp_path / "images", "--length", 8, "--json").stdout)
    assert {law["law"].partition(":")[0] for law in report["laws"]} >= {"vision", "decoder"} and report["failed"] == 0


def test_invalid_models_are_refused(tmp_path: Path, checkpoint: Path) -> None:
    assert "neither a file or folder nor a known name" in str(regard("verify", "nothing").exception)
    assert "cannot change it" in str(regard("verify", checkpoint, "--model.width=8").exception)
    assert "--pattern cannot change it" in str(regard("verify", checkpoint, "--pattern", "full").exception)
    (tmp_path / "rope.toml").write_text(Rope().to_toml())
    assert "kind rope, not of a model" in str(regard("verify", tmp_path / "rope.toml").exception)
    short_context = decoder(block(Attention(4)))
    (tmp_path / "short.json").write_text(short_context.to_json().replace('"width"', '"context": 3, "width"'))
    assert "too short for the laws" in str(regard("verify", tmp_path / "short.json").exception)


def test_help_lists_every_flag() -> None:
    help_text = regard("verify", "--help").output
    assert all(flag in help_text for flag in ("--pattern", "--length", "--seed", "--device", "--json"))


def test_the_length_is_sufficient_for_every_mask_up_to_a_limit() -> None:
    assert first_effect(Window(5)) == 6 and first_effect(Window(600)) == 601 and first_effect(Window(5000)) == 4097
    short_window, long_window = (decoder(block(Attention(4, mask=Window(size)))) for size in (40, 4000))
    assert sufficient_length(build(short_window), short_window) == 49 and not ineffective_masks(short_window, 49)
    assert sufficient_length(build(long_window), long_window) == MIN_LENGTH
    assert ineffective_masks(long_window, MIN_LENGTH) == {Window(4000): 4009}
    full = decoder(block(Attention(4)))
    assert sufficient_length(build(full), full) == MIN_LENGTH and not ineffective_masks(full, 4)
    assert Full() not in ineffective_masks(OTHERS["encoder"], 4)


def test_verify_accepts_a_module_a_spec_or_a_folder(checkpoint: Path) -> None:
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
    omit_bias_when_decoding(monkeypatch)
    report = public.verify(ALIBI, length=8)
    assert not report.ok and "cached = whole" in [verdict.law for verdict in report.failed]
    assert str(report).endswith(f"{len(report.failed)} of {len(LAWS)} laws do not hold")


def test_verify_does_not_change_the_model() -> None:
    model = build(HYBRID)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    calls: list[tuple[str, str]] = []
    verify(model, 8, on_law=lambda law, dtype: calls.append((law, dtype)))
    assert model.state_dict().keys() == before.keys()
    assert all((model.state_dict()[name] == tensor).all() for name, tensor in before.items())
    assert calls == [(law, dtype) for dtype in ("float64", "float32") for law in LAWS]
