"""LoRA of stacked weights: experts have one pair of matrices each, latent attention one per head."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from regard.adapt import (
    AdapterError,
    LoRA,
    adapter_names,
    add_lora,
    load_adapter,
    merge_lora,
    save_adapter,
    set_adapter,
    unmerge_lora,
)
from regard.engine.engine import Engine
from regard.engine.request import Sampling
from tests.laws import assert_equal_weights

LATENT, EXPERTS = "stack.blocks.0.sublayers.0.body", "stack.blocks.0.sublayers.1.body.experts"
TARGETS = ("q_proj", "k_up", "v_up", "up_proj", "down_proj")


@pytest.fixture
def adapted(make_stacked, randomize_adapter):
    model = make_stacked()
    names = add_lora(model, LoRA(rank=2, alpha=4.0, targets=TARGETS), seed=0)
    randomize_adapter(model)
    return model, names


def test_targets_match_experts_and_latent_projections(adapted, make_stacked):
    _, names = adapted
    assert {f"{LATENT}.k_up", f"{LATENT}.v_up", f"{EXPERTS}.up_proj", f"{EXPERTS}.down_proj"} <= set(names)
    model = make_stacked()
    all_names = add_lora(model, LoRA(targets="all-linear"))
    assert set(names) < set(all_names) and "head" not in all_names
    assert any("router" in name for name in all_names)


def test_an_adapter_adds_one_product_per_expert_and_per_head(adapted, make_stacked, ids):
    model, _ = adapted
    reference = make_stacked()
    for path in (f"{EXPERTS}.up_proj", f"{EXPERTS}.down_proj"):
        layer, base = model.get_submodule(path), reference.get_submodule(path)
        a, b = layer.lora_A.default.weight, layer.lora_B.default.weight
        assert len(a) == len(b) == 4
        for expert in range(4):
            base.weight.data[expert] += 2.0 * b[expert] @ a[expert]
    latent, base = model.get_submodule(LATENT), reference.get_submodule(LATENT)
    for name in ("k_up", "v_up"):
        layer = latent.parametrizations[name][0]
        for head in range(3):
            a, b = layer.lora_A.default.weight[head], layer.lora_B.default.weight[head]
            getattr(base, name).data[head] += 2.0 * b @ a
    for name in ("q_proj", "up_proj", "down_proj"):
        for path, module in model.named_modules():
            if path.endswith(name) and not path.startswith(EXPERTS):
                change = 2.0 * module.lora_B.default.weight @ module.lora_A.default.weight
                reference.get_submodule(path).weight.data += change
    assert (model(ids) - reference(ids)).abs().max() <= 1e-12


def test_merged_equals_unmerged_and_adapters_off_equals_the_base(adapted, make_stacked, assert_equal_base_weights, ids):
    model, _ = adapted
    reference, output = make_stacked(), model(ids)
    set_adapter(model, None)
    assert_equal_base_weights(model, reference)
    assert (model(ids) - reference(ids)).abs().max() <= 1e-12
    set_adapter(model, "default")
    assert torch.equal(model(ids), output) and (output - reference(ids)).abs().max() > 1e-3
    layers = merge_lora(model)
    assert model.state_dict().keys() == reference.state_dict().keys()
    assert (model(ids) - output).abs().max() <= 1e-12
    unmerge_lora(model, layers)
    assert torch.equal(model(ids), output)
    set_adapter(model, None)
    assert_equal_base_weights(model, reference)
    assert (model(ids) - reference(ids)).abs().max() <= 1e-12


def test_unmerging_a_second_time_changes_nothing(adapted, ids):
    model, _ = adapted
    output, keys = model(ids), list(model.state_dict())
    layers = merge_lora(model.train())
    unmerge_lora(model.eval(), layers)
    assert not any(layer.training for layer in layers.values())
    unmerge_lora(model, layers)
    assert torch.equal(model(ids), output) and list(model.state_dict()) == keys
    add_lora(model, LoRA(rank=2, targets=TARGETS), name="later")
    unmerge_lora(model, layers)
    assert adapter_names(model) == ["default", "later"]


@pytest.mark.parametrize("targets", [("q_proj",), ("k_up",), ("up_proj",), ("o_proj",)], ids=str)
def test_unmerging_is_refused_after_another_adapter_was_added_or_merged(adapted, randomize_adapter, ids, targets):
    model, _ = adapted
    output, layers = model(ids), merge_lora(model)
    add_lora(model, LoRA(rank=2, targets=targets), name="later")
    randomize_adapter(model)
    later = model(ids)
    with pytest.raises(AdapterError, match="'later' was added after the merge.*unmerge before"):
        unmerge_lora(model, layers)
    assert adapter_names(model) == ["later"] and torch.equal(model(ids), later)
    merged_later = merge_lora(model)
    if targets != ("o_proj",):  # o_proj is not one of the layers of the first merge
        merged = model(ids)
        with pytest.raises(AdapterError, match="was replaced or merged again after this merge.*latest merge first"):
            unmerge_lora(model, layers)
        assert torch.equal(model(ids), merged)
    unmerge_lora(model, merged_later)
    assert torch.equal(model(ids), later) and not torch.equal(later, output)


def test_decoding_with_a_cache_equals_the_whole_forward(adapted):
    """The latent projections are used in both forms, expanded and absorbed."""
    model, tokens = adapted[0], [1, 2, 3, 4, 5]
    for token in Engine(model, rows=1, capacity=32).generate(list(tokens), Sampling(max_new=8, temperature=0)):
        assert token.id == model(torch.tensor([tokens]))[0, -1].argmax()
        tokens.append(token.id)


def test_only_adapters_get_gradients(adapted, ids):
    model, names = adapted
    loss = cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert len(trained) == 2 * len(names) and all("lora_" in name for name in trained)
    assert all(p.grad.abs().max() > 0 for n, p in model.named_parameters() if n in trained)


def test_dropout_of_stacked_weights_is_refused(make_stacked):
    model = make_stacked()
    with pytest.raises(AdapterError, match=r"dropout=0\.1 does not work for stacked weights .*up_proj.*set it to 0"):
        add_lora(model, LoRA(targets=("q_proj", "up_proj"), dropout=0.1))
    assert add_lora(model, LoRA(targets=("q_proj",), dropout=0.1))


def test_files_of_stacked_adapters_round_trip(adapted, make_stacked, ids, tmp_path):
    model, names = adapted
    save_adapter(model, tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert tensors[f"base_model.model.{EXPERTS}.up_proj.lora_A.weight"].shape == (4 * 2, 16)
    assert tensors[f"base_model.model.{EXPERTS}.up_proj.lora_B.weight"].shape == (24, 2 * 4)
    other = make_stacked()
    assert sorted(load_adapter(other, tmp_path)) == sorted(names)
    assert_equal_weights(other, model)
    assert (other(ids) - model(ids)).abs().max() <= 1e-12
    with pytest.raises(AdapterError, match="stacked weight.*save without names"):
        save_adapter(model, tmp_path / "renamed", names=lambda path: f"model.{path}")


@pytest.mark.parametrize("targets", [TARGETS, ("k_up",), ("v_up", "q_proj"), "all-linear"], ids=str)
def test_peft_has_the_same_output_with_our_files(make_stacked, randomize_adapter, ids, tmp_path, targets):
    peft = pytest.importorskip("peft")
    model = make_stacked()
    add_lora(model, LoRA(rank=2, alpha=4.0, targets=targets), seed=0)
    randomize_adapter(model)
    save_adapter(model, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text()) | {"task_type": None}
    theirs = peft.get_peft_model(make_stacked(), peft.LoraConfig(**config)).eval()
    result = peft.set_peft_model_state_dict(theirs, load_file(tmp_path / "adapter_model.safetensors"))
    assert not result.unexpected_keys and not [key for key in result.missing_keys if "lora_" in key]
    assert (theirs(ids) - model(ids)).abs().max() <= 1e-12


def test_files_of_peft_have_the_same_output_here(make_stacked, randomize_adapter, ids, tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=2,
        lora_alpha=4,
        target_modules=["q_proj"],
        target_parameters=["experts.up_proj.weight", "body.k_up", "body.v_up", f"{EXPERTS}.down_proj.weight"],
    )
    theirs = peft.get_peft_model(make_stacked(), config).eval()
    randomize_adapter(theirs)
    theirs.save_pretrained(tmp_path)
    model = make_stacked()
    assert len(load_adapter(model, tmp_path)) == 2 + 4
    assert (theirs(ids) - model(ids)).abs().max() <= 1e-12
