"""Packed linears compute the same, on a copy; the model they came from does not notice."""

import pytest
import torch

from regard.adapt.packed import PackedLinear, packed
from regard.lens import attention_maps
from tests.laws import MODELS, build, error, text


@pytest.mark.parametrize("name", MODELS)
def test_the_same_logits(name: str) -> None:
    model = build(MODELS[name])
    before = {key: value.clone() for key, value in model.state_dict().items()}
    copy = packed(model)
    assert any(isinstance(module, PackedLinear) for module in copy.modules())
    assert not any(isinstance(module, PackedLinear) for module in model.modules())
    tokens = text(2, 12)
    assert error(copy(tokens), model(tokens)) < 1e-12
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_what_is_not_packed_is_shared() -> None:
    model = build(MODELS["multi-head"])
    copy = packed(model)
    assert copy.embedding.weight is model.embedding.weight and copy.norm.weight is model.norm.weight


def test_the_lens_looks_into_a_packed_model_too() -> None:
    model = build(MODELS["grouped-query"])
    ids = text(9)
    for ours, theirs in zip(attention_maps(packed(model), ids), attention_maps(model, ids), strict=True):
        assert ours is not None and theirs is not None and error(ours, theirs) < 1e-12
