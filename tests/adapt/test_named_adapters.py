"""Several named adapters on one model: each computes as if it were the only one."""

import pytest
import torch

from regard.adapt import (
    AdapterError,
    LoRA,
    adapter_names,
    add_lora,
    disable_adapters,
    load_adapter,
    merge_lora,
    save_adapter,
    set_adapter,
    unmerge_lora,
)
from regard.checkpoint import CheckpointError, export, save
from tests.laws import assert_equal_weights

LORAS = {
    "story": LoRA(rank=2, targets=("q_proj", "up_proj")),
    "code": LoRA(rank=3, alpha=9.0, targets=("v_proj", "up_proj")),
}


@pytest.fixture
def adapted_model(make_model, randomize_adapter):
    """A model with two adapters, of which the second one is active."""
    model = make_model().eval()
    for name, lora in LORAS.items():
        add_lora(model, lora, seed=0, name=name)
        randomize_adapter(model)
    return model


def outputs(model, ids, name):
    set_adapter(model, name)
    return model(ids)


def assert_equal_adapters(model, adapted_model, name):
    """The only adapter of the model equals the named one of the adapted model, bit for bit."""
    tensors = {key: tensor for key, tensor in adapted_model.state_dict().items() if f".{name}.weight" in key}
    found = {key.replace(".default.", f".{name}."): t for key, t in model.state_dict().items() if "lora_" in key}
    assert found and found.keys() == tensors.keys()
    assert all(torch.equal(tensor, tensors[key]) for key, tensor in found.items())


def test_each_adapter_computes_as_if_it_were_the_only_one(
    adapted_model, make_model, assert_equal_base_weights, ids, tmp_path
):
    assert adapter_names(adapted_model) == ["story", "code"]
    for name in LORAS:
        save_adapter(adapted_model, tmp_path / name, name=name)
        reference = make_model().eval()
        load_adapter(reference, tmp_path / name)
        assert_equal_adapters(reference, adapted_model, name)
        assert (outputs(adapted_model, ids, name) - reference(ids)).abs().max() <= 1e-12
    base_model = make_model().eval()
    assert (outputs(adapted_model, ids, None) - base_model(ids)).abs().max() <= 1e-12
    assert_equal_base_weights(adapted_model, base_model)
    assert not torch.equal(outputs(adapted_model, ids, "story"), outputs(adapted_model, ids, "code"))


def test_only_the_active_adapter_is_trainable(adapted_model):
    for name in ("story", "code", None):
        set_adapter(adapted_model, name)
        trained = {n for n, p in adapted_model.named_parameters() if p.requires_grad}
        assert trained == {n for n, _ in adapted_model.named_parameters() if f".{name}.weight" in n}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_disabled_adapters_leave_exactly_the_base_model(adapted_model, make_model, ids, dtype):
    adapted_model.to(dtype)
    base = make_model().eval().to(dtype)(ids)
    adapted = adapted_model(ids)
    trained = [name for name, p in adapted_model.named_parameters() if p.requires_grad]
    with disable_adapters(adapted_model):
        assert torch.equal(adapted_model(ids), base)
        with disable_adapters(adapted_model):
            assert torch.equal(adapted_model(ids), base)
        assert torch.equal(adapted_model(ids), base)
        assert [name for name, p in adapted_model.named_parameters() if p.requires_grad] == trained
    assert torch.equal(adapted_model(ids), adapted) and not torch.equal(adapted, base)
    with pytest.raises(RuntimeError, match="inside"), disable_adapters(adapted_model):
        raise RuntimeError("inside")
    assert torch.equal(adapted_model(ids), adapted)


def test_disabling_adapters_of_stacked_weights(make_stacked, randomize_adapter, ids):
    model, base = make_stacked(), make_stacked()
    add_lora(model, LoRA(targets="all-linear"), seed=0)
    randomize_adapter(model)
    with disable_adapters(model):
        assert torch.equal(model(ids), base(ids))
    assert not torch.equal(model(ids), base(ids))
    with pytest.raises(AdapterError, match="has no LoRA adapters; add or load some"), disable_adapters(base):
        pass


@pytest.mark.parametrize("name", LORAS)
def test_one_adapter_is_merged_and_unmerging_restores_all(adapted_model, make_model, ids, tmp_path, name):
    adapted = {other: outputs(adapted_model, ids, other) for other in LORAS}
    with pytest.raises(CheckpointError, match="part of an adapter; save it with save_adapter, or use merge_lora"):
        save(adapted_model, tmp_path / "model")
    with pytest.raises(CheckpointError, match="lora_A.* is part of an adapter; save it .*, or use merge_lora"):
        export(adapted_model, tmp_path / "exported", "llama")
    assert not (tmp_path / "exported").exists()
    layers = merge_lora(adapted_model, name)
    assert adapted_model.state_dict().keys() == make_model().state_dict().keys()
    assert (adapted_model(ids) - adapted[name]).abs().max() <= 1e-12
    save(adapted_model, tmp_path / "model")
    unmerge_lora(adapted_model, layers)
    assert all(torch.equal(outputs(adapted_model, ids, other), adapted[other]) for other in LORAS)


def test_several_adapters_are_loaded_from_their_folders(adapted_model, make_model, ids, tmp_path):
    for name in LORAS:
        save_adapter(adapted_model, tmp_path / name, name=name)
    model = make_model().eval()
    for name in LORAS:
        load_adapter(model, tmp_path / name, name=name)
    assert adapter_names(model) == list(LORAS)
    assert_equal_weights(model, adapted_model)
    for name in LORAS:
        assert (outputs(model, ids, name) - outputs(adapted_model, ids, name)).abs().max() <= 1e-12


def test_the_active_adapter_is_saved_and_merged_by_default(adapted_model, make_model, ids, tmp_path):
    save_adapter(adapted_model, tmp_path)
    other = make_model().eval()
    load_adapter(other, tmp_path)
    assert_equal_adapters(other, adapted_model, "code")
    assert (other(ids) - adapted_model(ids)).abs().max() <= 1e-12
    set_adapter(adapted_model, None)
    for function in (merge_lora, lambda model: save_adapter(model, tmp_path)):
        with pytest.raises(AdapterError, match="no adapter is active; name the one to .*: story, code"):
            function(adapted_model)


def test_wrong_names_are_refused(adapted_model, tmp_path):
    for function in (set_adapter, merge_lora, lambda model, name: save_adapter(model, tmp_path, name=name)):
        with pytest.raises(AdapterError, match="no adapter named 'poem'; it has story, code"):
            function(adapted_model, "poem")
    with pytest.raises(AdapterError, match="already has an adapter named 'code'"):
        add_lora(adapted_model, LoRA(), name="code")
    for name in ("", "a.b", "../x"):
        with pytest.raises(AdapterError, match="use letters, digits, - and _"):
            add_lora(adapted_model, LoRA(), name=name)


@pytest.mark.parametrize("name", ["", "a.b", "keys", "values", "type", "to", "forward", "training", "_modules"])
def test_names_that_modules_use_are_refused_before_the_model_is_changed(make_model, adapted_model, tmp_path, name):
    save_adapter(adapted_model, tmp_path)
    model = make_model()
    keys = list(model.state_dict())
    for add in (lambda: add_lora(model, LoRA(), name=name), lambda: load_adapter(model, tmp_path, name=name)):
        with pytest.raises(AdapterError, match=rf"{name!r} is (an attribute of PyTorch's|not a name)"):
            add()
    assert list(model.state_dict()) == keys and all(parameter.requires_grad for parameter in model.parameters())
