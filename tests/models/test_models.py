"""Every kind of model round trips as a spec, is built from a seed, saved, loaded, and counted without building."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from regard.checkpoint import CheckpointError, load, save
from regard.checkpoint.model_folder import count_parameters
from regard.models.base import Model
from regard.models.decoder import Decoder
from regard.models.generative.autoencoder import Autoencoder
from regard.models.generative.base import MLP
from regard.models.generative.gan import GAN
from regard.models.generative.vae import VAE
from regard.models.heads import Classification, Dense, MaskedLM, Pooled
from regard.models.interleaved import Interleaved
from regard.models.presets import BERT_DENSE, bert, clip, transformer_2017, vit
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import SwiGLU
from regard.parts.patches import Patches
from regard.parts.position.rope import Rope
from regard.spec import SpecError
from tests.laws import assert_equal_weights, error, random_ids

SMALL_BERT = {"vocab": 31, "width": 24, "heads": 4, "hidden": 40, "layers": 2, "length": 16}
SMALL_VIT = {"image": 8, "patch": 4, "width": 24, "heads": 4, "hidden": 40, "layers": 2, "labels": 3}
SMALL_CLIP = {
    "image": 8, "patch": 4, "width": 24, "heads": 4, "layers": 2, "vocab": 31, "length": 12,
    "text_width": 16, "text_heads": 2, "dim": 10,
}  # fmt: skip
IMAGES = torch.linspace(-1, 1, 2 * 3 * 8 * 8).view(2, 3, 8, 8).sin()
DECODER = Decoder(31, 24, (Repeat((Block((Sublayer(Attention(4, position=Rope())), Sublayer(SwiGLU(40)))),), 2),))
CASES = {  # name: model and inputs
    "encoder": (bert(**SMALL_BERT), (random_ids(2, 5),)),
    "masked": (bert(**SMALL_BERT, head=MaskedLM(BERT_DENSE)), (random_ids(2, 5),)),
    "classifier": (bert(**SMALL_BERT, head=Classification(3, dense=Dense())), (random_ids(2, 5),)),
    "embedder": (bert(**SMALL_BERT, head=Pooled("mean", 7)), (random_ids(2, 5),)),
    "vit": (vit(**SMALL_VIT), (IMAGES,)),
    "spectrogram": (
        replace(vit(**SMALL_VIT), input=Patches((4, 4), (8, 8), stride=(4, 4), registers=0, bias=False)),
        (IMAGES,),
    ),
    "encoder-decoder": (transformer_2017(31, 24, 4, 40, 2), (random_ids(2, 7), random_ids(2, 5))),
    "dual encoder": (clip(**SMALL_CLIP), (IMAGES, random_ids(2, 5))),
    "dual encoder, bias": (replace(clip(**SMALL_CLIP), bias=-10.0), (IMAGES, random_ids(2, 5))),
    "interleaved": (
        Interleaved(replace(vit(**SMALL_VIT), head=None), DECODER, 5),
        (torch.tensor([[1, 5, 5, 5, 5, 2], [5, 5, 5, 5, 3, 4]]), None, None, IMAGES),
    ),
}
LINEAR, SPECTRAL = MLP(()), MLP((8,), Dense("relu"), spectral_norm=True)
CASES |= {
    "autoencoder": (Autoencoder((3, 8, 8), 4, decoder=LINEAR), (IMAGES,)),
    "vae": (VAE((3, 8, 8), 4, "tanh"), (IMAGES, torch.tensor([[0.0, 1.0, -1.0, 2.0]] * 2))),
    "gan": (GAN((2,), 3, discriminator=SPECTRAL), (torch.tensor([[0.5, -1.0, 2.0]]),)),
}
GENERATIVE = ("autoencoder", "vae", "gan")
every_model = pytest.mark.parametrize("name", CASES)


def run(model: nn.Module, inputs: tuple) -> Tensor:
    with torch.no_grad():
        outputs = model.eval()(*inputs)
    return outputs[0] if isinstance(outputs, tuple) else outputs


@every_model
def test_a_model_is_the_same_in_python_json_and_toml(name: str) -> None:
    spec = CASES[name][0]
    assert type(spec).from_json(spec.to_json()) == spec
    assert type(spec).from_toml(spec.to_toml()) == spec
    assert spec.kind in ("encoder", "encoder_decoder", "dual_encoder", "interleaved", *GENERATIVE)


@every_model
def test_a_seed_determines_the_weights_and_leaves_the_global_generator_unchanged(name: str) -> None:
    spec, inputs = CASES[name]
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first, same_seed, other_seed = (spec.build(seed) for seed in (1, 1, 2))
    outputs = [run(model, inputs) for model in (first, same_seed, other_seed)]
    assert torch.equal(torch.rand(3), expected)
    assert_equal_weights(first, same_seed)
    assert error(outputs[0], outputs[1]) <= 1e-5 < error(outputs[0], outputs[2])


@every_model
def test_a_loaded_model_equals_the_saved_one(name: str, tmp_path: Path) -> None:
    spec, inputs = CASES[name]
    saved = spec.build(0)
    save(saved, tmp_path / "model")
    loaded = load(tmp_path / "model")
    assert loaded.spec == spec
    assert not loaded.training
    assert_equal_weights(loaded, saved)
    assert error(run(loaded, inputs), run(saved, inputs)) <= 1e-5
    names = [n for n, _ in saved.named_parameters()]
    assert [n for n, _ in loaded.named_parameters()] == names  # tied weights are tied again


@every_model
def test_parameters_are_counted_without_building(name: str) -> None:
    spec: Model = CASES[name][0]
    assert count_parameters(spec) == sum(p.numel() for p in spec.build().parameters())


def test_a_config_that_does_not_fit_its_files_is_refused(tmp_path: Path) -> None:
    """A depth of 10⁹ is refused before any layer is built."""
    save(CASES["encoder-decoder"][0].build(0), tmp_path / "model")
    (tmp_path / "model" / "manifest.json").unlink()
    file = tmp_path / "model" / "config.json"
    config = json.loads(file.read_text())
    config["spec"]["source"]["layers"][0]["times"] = 10**9
    file.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="the config has .* parameters, but the files have"):
        load(tmp_path / "model")
    config["spec"] = {"kind": "tokens", "vocab": 3}
    file.write_text(json.dumps(config))
    with pytest.raises(SpecError, match="of kind tokens, which is not a model"):
        load(tmp_path / "model")


@every_model
def test_every_weight_gets_a_finite_gradient(name: str) -> None:
    spec, inputs = CASES[name]
    model = spec.build(0).double().eval()
    inputs = tuple(x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs)
    outputs = model(*inputs)
    outputs = model.score(outputs) if isinstance(spec, GAN) else outputs  # the forward of a GAN is its generator
    (outputs[0] if isinstance(outputs, tuple) else outputs).sin().sum().backward()
    for path, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), path


FROZEN_NAMES = {
    "masked": """input.table.weight input.types.weight position.table.weight embedding_norm.weight embedding_norm.bias
        head.dense.dense.weight head.dense.dense.bias head.dense.norm.weight head.dense.norm.bias
        head.vocab.bias""",
    "classifier": "head.dense.dense.weight head.dense.dense.bias head.labels.weight head.labels.bias",
    "embedder": "head.proj.weight",
    "vit": "input.cls input.proj.weight input.proj.bias position.table.weight norm.weight norm.bias",
    "encoder-decoder": "source.input.table.weight",
    "dual encoder, bias": "scale bias image.input.cls image.head.proj.weight text.input.table.weight",
    "interleaved": """vision.input.cls projector.up.weight projector.up.bias projector.down.weight
        projector.down.bias decoder.embedding.weight decoder.norm.weight""",
}


@pytest.mark.parametrize("name", FROZEN_NAMES)
def test_names_of_weights_are_frozen(name: str) -> None:
    """Checkpoints depend on these names: a change here needs a way to read the old ones."""
    names = [n for n, _ in CASES[name][0].build().named_parameters()]
    assert set(FROZEN_NAMES[name].split()) <= set(names), set(FROZEN_NAMES[name].split()) - set(names)
