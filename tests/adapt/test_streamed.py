"""Streamed linears compute the same, on a copy that owns no weights; the model they came from does not notice."""

import warnings

import pytest
import torch
from torch import Tensor, nn

from regard.adapt.streamed import StreamedLinear, streamed
from regard.lens import attention_maps
from tests.laws import MODELS, build, error, text


@pytest.mark.parametrize("name", MODELS)
def test_the_same_logits(name: str) -> None:
    model = build(MODELS[name])
    copy = streamed(model)
    assert any(isinstance(module, StreamedLinear) for module in copy.modules())
    assert not any(isinstance(module, StreamedLinear) for module in model.modules())
    tokens = text(2, 12)
    assert error(copy(tokens), model(tokens)) < 1e-12


def test_every_weight_is_shared() -> None:
    model = build(MODELS["multi-head"])
    ours, theirs = dict(streamed(model).named_parameters()), dict(model.named_parameters())
    assert ours.keys() == theirs.keys() and all(ours[name] is theirs[name] for name in ours)


@pytest.mark.parametrize("outputs", [1, 2, 7, 12])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5,), (1, 5), (1, 1, 5), (2, 5)])
def test_two_streams_are_one_product(
    shape: tuple[int, ...], bias: bool, outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = nn.Linear(5, outputs, bias).double()
    x = torch.randn(shape, dtype=torch.float64)
    monkeypatch.setattr("torch.compiler.is_compiling", lambda: True)  # the sums, without waiting for a compiler
    monkeypatch.setattr("torch.nn.functional.linear", refused if len(shape) == 1 or shape[0] == 1 else linear_of)
    assert error(StreamedLinear(linear)(x), x @ linear.weight.T + (linear.bias if bias else 0)) < 1e-12


def refused(*tensors: Tensor) -> Tensor:
    raise AssertionError("one row should have been summed in streams")


def linear_of(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x @ weight.T + (0 if bias is None else bias)


@pytest.mark.slow
def test_compiled() -> None:
    linear = nn.Linear(64, 33)
    x = torch.randn(1, 1, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, on its first compile
        got = torch.compile(StreamedLinear(linear), fullgraph=True)(x)
    torch.testing.assert_close(got, linear(x))


def test_the_lens_looks_into_a_streamed_model_too() -> None:
    model = build(MODELS["grouped-query"])
    ids = text(9)
    for ours, theirs in zip(attention_maps(streamed(model), ids), attention_maps(model, ids), strict=True):
        assert ours is not None and theirs is not None and error(ours, theirs) < 1e-12
