"""The value head of a decoder: its values, and that nothing but training uses it."""

import dataclasses
from pathlib import Path

import pytest
import torch

import regard
from regard.adapt.adapters import add_lora
from regard.adapt.lora import LoRA
from regard.checkpoint.gguf import export_gguf
from regard.checkpoint.model_folder import export
from regard.checkpoint.model_folder import load as load_folder
from regard.families import detect_family
from regard.models.decoder import DecoderModule
from regard.models.outputs import materialize
from regard.models.value_head import ValueHead, without_value_head
from regard.planning.parameters import count_parameters
from regard.planning.part_tree import part_tree
from regard.text.train import byte
from regard.verification.report import attempt
from regard.verification.trial import Trial

LAYER = regard.Block((regard.Sublayer(regard.Attention(2, position=regard.Rope())), regard.Sublayer(regard.SwiGLU(24))))
TOKENIZER = byte()
PLAIN = regard.Decoder(TOKENIZER.vocab_size, 16, (regard.Repeat((LAYER,), 2),), context=64)
SPEC = dataclasses.replace(PLAIN, value_head=True)
TOKENS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])


@pytest.fixture
def model() -> DecoderModule:
    """With a value head that is trained."""
    model = SPEC.build(seed=0).eval()
    with torch.no_grad():
        model.value_head.weight.normal_(generator=torch.Generator().manual_seed(1))
        model.value_head.bias.fill_(0.5)
    return model


@torch.no_grad()
def test_values_are_products_with_the_hidden_states_and_start_at_zero(model: DecoderModule) -> None:
    outputs, hidden = model(TOKENS, outputs=True), model.hidden(TOKENS)
    for row in range(2):
        for t in range(4):
            expected = 0.5 + sum(
                float(w) * float(h) for w, h in zip(model.value_head.weight, hidden[row, t], strict=True)
            )
            assert abs(float(outputs.values[row, t]) - expected) < 1e-5
    new = SPEC.build(seed=0).eval()
    assert not new(TOKENS, outputs=True).values.any()
    assert PLAIN.build(seed=0)(TOKENS, outputs=True).values is None


@torch.no_grad()
def test_other_weights_and_logits_are_those_without_the_head(model: DecoderModule) -> None:
    plain = PLAIN.build(seed=0).eval()
    assert model.state_dict().keys() - plain.state_dict().keys() == {"value_head.weight", "value_head.bias"}
    assert torch.equal(model(TOKENS), plain(TOKENS))
    assert torch.equal(materialize(model(TOKENS, outputs=True).logits), plain(TOKENS))


def test_values_of_half_precision_are_computed_in_float32() -> None:
    head = ValueHead(3)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([1.0, 1.0, 2**-12]))
    values = head(torch.ones(1, 1, 3, dtype=torch.bfloat16))
    assert values.dtype == torch.float32 and values.item() == 2 + 2**-12
    assert head.double()(torch.ones(1, 1, 3).double()).dtype == torch.float64


def test_adapters_and_plans_leave_the_head_out(model: DecoderModule) -> None:
    count = count_parameters(SPEC)
    assert count.total - count_parameters(PLAIN).total == 17 and count.active == count_parameters(PLAIN).active
    assert [part["kind"] for part in part_tree(SPEC, 8)["stacks"][0]["after"]][-1] == "value_head"
    assert not any("value_head" in name for name in add_lora(model, LoRA(rank=2)))


def test_an_export_without_the_head_is_no_broken_law(model: DecoderModule) -> None:
    outcome = attempt("exported and imported = original", Trial(model.requires_grad_(False), 8))
    assert outcome.difference == 0 and "llama" in outcome.note


@torch.no_grad()
def test_a_model_with_a_value_head_generates_is_saved_and_is_exported_without_it(
    model: DecoderModule, tmp_path: Path
) -> None:
    plain = PLAIN.build(seed=0).eval()
    regard.save(model, tmp_path / "own", TOKENIZER)
    regard.save(plain, tmp_path / "plain", TOKENIZER)
    loaded = load_folder(tmp_path / "own")
    assert loaded.spec == SPEC and torch.equal(loaded.value_head.weight, model.value_head.weight)
    texts = [
        regard.load(tmp_path / name, "cpu").generate("Where is", max_new=8, temperature=0.0)
        for name in ("own", "plain")
    ]
    assert texts[0] == texts[1]
    family = detect_family(SPEC)
    export(model, tmp_path / "exported", family, TOKENIZER)
    export_gguf(model, tmp_path / "model.gguf", family, "f32")
    for path in ("exported", "model.gguf"):
        found = load_folder(tmp_path / path)
        assert found.spec.value_head is False and torch.equal(found(TOKENS), plain(TOKENS)), path
    assert without_value_head(SPEC) == PLAIN
