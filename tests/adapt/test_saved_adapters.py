"""A saved and loaded adapter has the same output, for every mixer, whether its layers share weights or not."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from regard.adapt import AdapterError, LoRA, add_lora, load_adapter, save_adapter
from regard.adapt.peft import restore_adapter
from regard.adapt.targets import adaptable_weights, last_component
from regard.models.decoder import Decoder, DecoderModule
from regard.models.stack import Repeat
from regard.parts.experts import Experts
from regard.parts.feedforward import SwiGLU
from regard.parts.latent_attention import LatentAttention
from tests.laws import GQA, MODELS, VOCAB, WIDTH, block, build, error, random_ids

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
STACKED = block(LatentAttention(3, 8, 6, 4), Experts(4, 2, SwiGLU(20), shared=SwiGLU(8)))
TIED = Decoder(VOCAB, WIDTH, (Repeat((STACKED, block(GQA)), 3, tied=True),))


def retied(spec: Decoder, tied: bool) -> Decoder:
    return replace(spec, layers=tuple(replace(repeat, times=2, tied=tied) for repeat in spec.layers))


def adapt(model: DecoderModule, targets: tuple[str, ...] | str) -> list[str]:
    """Add an adapter with random matrices; returns the names of the adapted layers."""
    names = add_lora(model, LoRA(rank=2, targets=targets), seed=0)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2, generator=generator)
    return names


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", MODELS)
def test_a_loaded_adapter_has_the_output_of_the_saved_one(name: str, tied: bool, tmp_path: Path) -> None:
    spec, tokens = retied(MODELS[name], tied), random_ids(2, 9)
    base = build(spec)
    layers = sorted({last_component(path) for path in adaptable_weights(base) if "head" not in path.split(".")})
    for index, targets in enumerate([(layers[0],), (layers[-1],), "all-linear"]):
        saved, loaded = build(spec), build(spec)
        names = adapt(saved, targets)
        save_adapter(saved, tmp_path / str(index))
        assert sorted(load_adapter(loaded, tmp_path / str(index))) == sorted(names)
        assert torch.equal(loaded(tokens), saved(tokens))
        assert error(saved(tokens), base(tokens)) > 1e-6


@pytest.mark.parametrize("targets", [("q_proj",), ("k_up", "v_up"), ("up_proj", "q_proj"), "all-linear"], ids=str)
def test_peft_adapts_every_repetition_of_tied_layers(targets: tuple[str, ...] | str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model, tokens = build(TIED), random_ids(2, 9)
    adapt(model, targets)
    save_adapter(model, tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text()) | {"task_type": None}
    peft_model = peft.get_peft_model(build(TIED), peft.LoraConfig(**config)).eval()
    result = peft.set_peft_model_state_dict(peft_model, load_file(tmp_path / TENSORS))
    assert not result.unexpected_keys and not [key for key in result.missing_keys if "lora_" in key]
    assert error(peft_model(tokens), model(tokens)) <= 1e-12


def test_files_with_the_first_repetition_only_are_loaded_and_restored(tmp_path: Path) -> None:
    model, tokens = build(TIED), random_ids(2, 9)
    adapt(model, ("q_proj", "up_proj"))
    save_adapter(model, tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(
        json.dumps(config | {"target_modules": ["q_proj", "up_proj"], "target_parameters": None})
    )
    tensors = load_file(tmp_path / TENSORS)
    first = {name: tensor for name, tensor in tensors.items() if re.search(r"blocks\.[01]\.", name)}
    assert len(first) == len(tensors) / 3
    save_file(first, tmp_path / TENSORS)
    loaded, restored = build(TIED), build(TIED)
    load_adapter(loaded, tmp_path)
    add_lora(restored, LoRA(rank=2, targets=("q_proj", "up_proj")))
    restore_adapter(restored, tmp_path)
    assert torch.equal(loaded(tokens), model(tokens)) and torch.equal(restored(tokens), model(tokens))


def test_repetitions_with_different_adapters_are_refused(tmp_path: Path) -> None:
    """PEFT trains one adapter per repetition; tied layers can have only one."""
    model = build(TIED).requires_grad_(True)
    keys = list(model.state_dict())
    adapt(source := build(TIED), ("q_proj",))
    save_adapter(source, tmp_path)
    tensors = load_file(tmp_path / TENSORS)
    name = next(name for name in tensors if "blocks.2." in name)
    save_file(tensors | {name: tensors[name] + 1}, tmp_path / TENSORS)
    with pytest.raises(AdapterError, match=r"blocks\.0\..* and .*blocks\.2\..* differ.*not tied"):
        load_adapter(model, tmp_path)
    assert list(model.state_dict()) == keys and all(parameter.requires_grad for parameter in model.parameters())


def test_a_model_that_stores_tied_layers_once_has_one_path_for_all_repetitions(tmp_path: Path) -> None:
    """As ALBERT in transformers, where the names of all our layers are one name."""

    def names(path: str) -> str:
        return re.sub(r"stack\.blocks\.\d+\.", "layer.", path)

    spec, tokens = Decoder(VOCAB, WIDTH, (Repeat((block(GQA),), 3, tied=True),)), random_ids(2, 9)
    saved, loaded = build(spec), build(spec)
    adapt(saved, ("q_proj", "down_proj"))
    save_adapter(saved, tmp_path, names=names)
    assert len(load_file(tmp_path / TENSORS)) == 2 * 2
    assert len(json.loads((tmp_path / CONFIG).read_text())["target_modules"]) == 2
    assert len(load_adapter(loaded, tmp_path, names=names)) == 2 * 3
    assert torch.equal(loaded(tokens), saved(tokens))
