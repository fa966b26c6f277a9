"""Several adapters on one model: each by its name computes as if it were alone."""

import pytest
import torch

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
from regard.checkpoint import CheckpointError, save

LORAS = {
    "story": LoRA(rank=2, targets=("q_proj", "up_proj")),
    "code": LoRA(rank=3, alpha=9.0, targets=("v_proj", "up_proj")),
}


@pytest.fixture
def two(make, stir):
    """A model with two adapters, of which the second one is active."""
    model = make().eval()
    for name, lora in LORAS.items():
        add_lora(model, lora, seed=0, name=name)
        stir(model)
    return model


def outputs(model, ids, name):
    set_adapter(model, name)
    return model(ids)


def test_each_computes_as_if_it_were_alone(two, make, ids, tmp_path):
    assert adapter_names(two) == ["story", "code"]
    for name in LORAS:
        save_adapter(two, tmp_path / name, name=name)
        alone = make().eval()
        load_adapter(alone, tmp_path / name)
        assert torch.equal(outputs(two, ids, name), alone(ids))
    assert torch.equal(outputs(two, ids, None), make().eval()(ids))
    assert not torch.equal(outputs(two, ids, "story"), outputs(two, ids, "code"))


def test_only_the_active_adapter_is_trainable(two):
    for name in ("story", "code", None):
        set_adapter(two, name)
        trained = {n for n, p in two.named_parameters() if p.requires_grad}
        assert trained == {n for n, _ in two.named_parameters() if f".{name}.weight" in n}


@pytest.mark.parametrize("name", LORAS)
def test_one_is_merged_and_all_come_back(two, make, ids, tmp_path, name):
    adapted = {other: outputs(two, ids, other) for other in LORAS}
    with pytest.raises(CheckpointError, match="part of an adapter; save it with save_adapter, or use merge_lora"):
        save(two, tmp_path / "model")
    layers = merge_lora(two, name)
    assert two.state_dict().keys() == make().state_dict().keys()
    assert (two(ids) - adapted[name]).abs().max() <= 1e-12
    save(two, tmp_path / "model")
    unmerge_lora(two, layers)
    assert all(torch.equal(outputs(two, ids, other), adapted[other]) for other in LORAS)


def test_several_folders_are_loaded(two, make, ids, tmp_path):
    for name in LORAS:
        save_adapter(two, tmp_path / name, name=name)
    model = make().eval()
    for name in LORAS:
        load_adapter(model, tmp_path / name, name=name)
    assert adapter_names(model) == list(LORAS)
    assert all(torch.equal(outputs(model, ids, name), outputs(two, ids, name)) for name in LORAS)


def test_the_active_adapter_is_saved_and_merged_by_default(two, make, ids, tmp_path):
    save_adapter(two, tmp_path)
    other = make().eval()
    load_adapter(other, tmp_path)
    assert torch.equal(other(ids), two(ids))
    set_adapter(two, None)
    for use in (merge_lora, lambda model: save_adapter(model, tmp_path)):
        with pytest.raises(AdapterError, match="no adapter is active; name the one to .*: story, code"):
            use(two)


def test_wrong_names_are_refused(two, tmp_path):
    for use in (set_adapter, merge_lora, lambda model, name: save_adapter(model, tmp_path, name=name)):
        with pytest.raises(AdapterError, match="no adapter named 'poem'; it has story, code"):
            use(two, "poem")
    with pytest.raises(AdapterError, match="already has an adapter named 'code'"):
        add_lora(two, LoRA(), name="code")
    for name in ("", "a.b", "../x"):
        with pytest.raises(AdapterError, match="use letters, digits, - and _"):
            add_lora(two, LoRA(), name=name)
