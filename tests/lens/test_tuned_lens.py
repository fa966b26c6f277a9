"""The tuned lens begins as the logit lens and comes nearer to the model's own predictions."""

from pathlib import Path

import pytest
import torch

from regard.lens import TunedLens, logit_lens
from regard.models.decoder import Decoder, DecoderModule
from regard.models.stack import Repeat
from regard.parts.position.rope import Rope
from tests.lens.conftest import attention_block


def build(layers: int = 3) -> DecoderModule:
    return Decoder(vocab=31, width=16, layers=(Repeat((attention_block(2, Rope()),), layers),)).build(seed=0).eval()


def test_it_begins_as_the_logit_lens(ids) -> None:
    model = build()
    found, plain = TunedLens(model).logits(ids), logit_lens(model, ids)
    assert list(found) == list(plain)
    assert all(torch.equal(found[name], plain[name]) for name in plain)


def test_fitting_lowers_the_divergence_and_changes_no_weight_of_the_model(tmp_path: Path, ids) -> None:
    model, generator = build(), torch.Generator().manual_seed(0)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    lens, steps = TunedLens(model), []
    batches = [torch.randint(31, (16, 12), generator=generator) for _ in range(60)]
    losses = lens.fit(batches, lr=1e-2, progress=lambda step, loss: steps.append(step))
    assert steps == list(range(60)) and sum(losses[-5:]) < 0.6 * sum(losses[:5])
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())
    lens.save(tmp_path / "lens.safetensors")
    loaded = TunedLens.load(tmp_path / "lens.safetensors", model)
    assert all(torch.equal(a, b) for a, b in zip(lens.logits(ids).values(), loaded.logits(ids).values(), strict=True))
    with pytest.raises(ValueError, match="no tuned lens of this model, which has 4 maps"):
        TunedLens.load(tmp_path / "lens.safetensors", build(layers=4))
