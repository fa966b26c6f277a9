"""Layers that share weights: one set of parameters, one state and one set of hooks per repetition."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from regard.adapt import AdapterError, LoRA, add_lora, merge_lora
from regard.checkpoint import CheckpointError, export, load, save
from regard.engine.engine import Engine
from regard.engine.request import Sampling
from regard.families.common.config_reader import FamilyError
from regard.models.decoder import Decoder
from regard.models.pattern import retile
from regard.models.stack import Repeat, unroll
from regard.parts.experts import Experts
from regard.parts.feedforward import SwiGLU
from regard.planning import plan
from regard.planning.training import lora_parameters
from regard.spec import Spec, SpecError
from tests.laws import GQA, SHARED, VOCAB, WIDTH, assert_equal_weights, block, build, error, random_ids

BLOCK = block(GQA)
TIED = Decoder(VOCAB, WIDTH, (Repeat((BLOCK,), 3, tied=True),))
UNTIED = replace(TIED, layers=(Repeat((BLOCK,), 3),))


def untied_copy(model: torch.nn.Module) -> torch.nn.Module:
    """The untied model with the weights of the tied one in every layer."""
    copy = build(UNTIED)
    copy.load_state_dict(model.state_dict())
    return copy


def test_every_repetition_has_the_same_weights_in_its_own_module() -> None:
    model = build(TIED)
    layers = model.stack.blocks
    assert len({id(layer) for layer in layers}) == 3
    names = [name for name, _ in model.named_parameters() if name.startswith("stack.")]
    assert names and all(name.startswith("stack.blocks.0.") for name in names)
    for layer in layers[1:]:
        assert all(a is b for a, b in zip(layers[0].parameters(), layer.parameters(), strict=True))
    untied = untied_copy(model)
    assert_equal_weights(untied, model)
    assert error(model(random_ids(2, 9)), untied(random_ids(2, 9))) <= 1e-12


def test_a_gradient_is_the_sum_over_repetitions() -> None:
    model = build(TIED)
    copy, tokens = untied_copy(model), random_ids(2, 9)
    for m in (model.requires_grad_(), copy.requires_grad_()):
        cross_entropy(m(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    untied = dict(copy.named_parameters())
    for name, parameter in model.stack.blocks[0].named_parameters():
        expected = sum(untied[f"stack.blocks.{layer}.{name}"].grad for layer in range(3))
        assert (parameter.grad - expected).abs().max() <= 1e-12


def test_every_repetition_has_its_own_state() -> None:
    assert len(TIED.memory()) == 3
    model, tokens = build(TIED), random_ids(9).tolist()
    for token in Engine(model, rows=2, capacity=64, store="paged").generate(tokens, Sampling(max_new=8, temperature=0)):
        assert token.id == model(torch.tensor([tokens]))[0, -1].argmax()
        tokens.append(token.id)


def test_hooks_of_a_repetition_run_once() -> None:
    model, calls = build(TIED), []
    model.get_submodule("stack.blocks.2").register_forward_hook(lambda *_: calls.append(2))
    model(random_ids(1, 4))
    assert calls == [2]


@pytest.mark.parametrize("mixer", [GQA, SHARED], ids=["attention", "shared block"])
def test_tied_weights_are_saved_once_and_tied_again_when_loaded(tmp_path: Path, mixer: Spec) -> None:
    spec = replace(TIED, layers=(Repeat((block(mixer),), 3, tied=True),))
    model = build(spec)
    save(model, tmp_path / "model")
    stored = sum(p.numel() for p in model.parameters()) * 8
    assert stored <= (tmp_path / "model" / "model.safetensors").stat().st_size < stored + 10_000
    loaded = load(tmp_path / "model")
    assert loaded.spec == spec and Spec.from_toml(spec.to_toml()) == spec
    assert_equal_weights(loaded, model)
    assert error(loaded(random_ids(2, 9)), model(random_ids(2, 9))) <= 1e-12
    assert all(a is b for a, b in zip(*(layer.parameters() for layer in list(loaded.stack.blocks)[:2]), strict=True))


def test_a_family_without_tied_layers_refuses_the_export(tmp_path: Path) -> None:
    with pytest.raises(FamilyError, match=r"layers\[0\].tied=True, only False"):
        export(build(TIED), tmp_path / "llama", "llama")
    assert not (tmp_path / "llama").exists()


def test_layers_tied_by_hand_are_refused_with_the_remedy(tmp_path: Path) -> None:
    model = build(UNTIED)
    model.stack.blocks[1] = model.stack.blocks[0]
    with pytest.raises(CheckpointError, match=r"blocks\.1\..* is tied to stack\.blocks\.0\..*Repeat\(.*tied=True\)"):
        save(model, tmp_path / "model")
    untied = build(TIED)
    untied.stack.blocks[1] = build(UNTIED).stack.blocks[1]
    with pytest.raises(CheckpointError, match=r"stack\.blocks\.1\..* is in the model only"):
        save(untied, tmp_path / "model")


def test_a_plan_counts_shared_weights_once_and_flops_per_repetition() -> None:
    tied, untied = plan(TIED, 64), plan(UNTIED, 64)
    assert tied.parameters == sum(p.numel() for p in build(TIED).parameters()) < untied.parameters
    assert tied.forward_flops == untied.forward_flops and tied.kv_bytes() == untied.kv_bytes()
    assert tied.weights_read == untied.weights_read  # every repetition reads the weights again


def test_active_parameters_include_the_experts_of_every_repetition() -> None:
    """Each repetition may route a token to another expert: with 1 of 4 experts each, (3/4)³ are unused after three."""
    routed = block(GQA, Experts(count=4, top_k=1, expert=SwiGLU(8)))
    once, thrice = (replace(TIED, layers=(Repeat((routed,), n, tied=True),)) for n in (1, 3))
    assert plan(once, 8).parameters == plan(thrice, 8).parameters
    expert = 3 * 8 * WIDTH
    assert plan(once, 8).count.inactive == 3 * expert
    assert plan(thrice, 8).count.inactive == round(3 * expert * (3 / 4) ** 2)


@pytest.mark.parametrize("mixer", [GQA, SHARED], ids=["attention", "shared block"])
def test_repetitions_share_an_adapter_which_can_be_merged(tmp_path: Path, mixer: Spec) -> None:
    spec = replace(TIED, layers=(Repeat((block(mixer),), 3, tied=True),))
    model, tokens = build(spec).eval(), random_ids(2, 9)
    add_lora(model, LoRA(rank=2, targets=("o_proj", "up_proj")), seed=0)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained and all(name.startswith("stack.blocks.0.") for name in trained)
    if mixer is GQA:
        assert sum(p.numel() for p in model.parameters() if p.requires_grad) == lora_parameters(
            spec, 2, ("o_proj", "up_proj")
        )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    adapted = model(tokens)
    merge_lora(model)
    assert (model(tokens) - adapted).abs().max() <= 1e-12
    save(model, tmp_path / "merged")
    loaded = load(tmp_path / "merged")
    assert_equal_weights(loaded, model)
    assert error(loaded(tokens), model(tokens)) <= 1e-12


@pytest.mark.parametrize("layers", [(0,), (2,), (0, 1)], ids=str)
def test_a_target_that_names_only_some_repetitions_is_refused(layers: tuple[int, ...]) -> None:
    model, tokens = build(TIED).requires_grad_(True), random_ids(2, 9)
    keys, output = list(model.state_dict()), model(tokens)
    names = [f"stack.blocks.{layer}.sublayers.0.body.q_proj" for layer in range(3)]
    left_out = ", ".join(name for layer, name in enumerate(names) if layer not in layers)
    with pytest.raises(AdapterError, match=f"shares its weight with {left_out}, .*target 'q_proj'"):
        add_lora(model, LoRA(rank=2, targets=tuple(names[layer] for layer in layers)))
    assert list(model.state_dict()) == keys and torch.equal(model(tokens), output)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert add_lora(model, LoRA(rank=2, targets=tuple(names))) == names


def test_a_pattern_for_tied_layers_is_refused() -> None:
    with pytest.raises(SpecError, match="tied=True.*set tied=False"):
        retile(TIED, "window(4), full")
    assert len(unroll(retile(UNTIED, "window(4), full").layers)) == 3


def test_one_tied_repetition_has_the_weights_of_an_untied_layer() -> None:
    once = replace(TIED, layers=(Repeat((BLOCK,), 1, tied=True),))
    assert list(build(once).state_dict()) == list(build(replace(once, layers=(Repeat((BLOCK,)),))).state_dict())
