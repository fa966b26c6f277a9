"""Linears optimized for decoding on a CPU: equal outputs, on a copy; the original model is unchanged."""

import warnings

import pytest
import torch
from torch import Tensor, nn

from regard.adapt.cpu_decode import SwappedLinear, TwoStreamLinear, optimize_for_cpu_decode
from regard.lens import attention_maps
from tests.laws import MODELS, build, error, random_ids

LINEAR_CLASSES = {"aarch64": TwoStreamLinear, "x86_64": SwappedLinear}


@pytest.fixture(params=LINEAR_CLASSES)
def linear_class(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[nn.Module]:
    """The class of linears for a CPU architecture that `platform.machine` is patched to return."""
    monkeypatch.setattr("platform.machine", lambda: request.param)
    return LINEAR_CLASSES[request.param]


@pytest.mark.parametrize("name", MODELS)
def test_the_copy_has_equal_logits_and_the_model_is_unchanged(name: str, linear_class: type[nn.Module]) -> None:
    model = build(MODELS[name])
    before = {key: value.clone() for key, value in model.state_dict().items()}
    copy = optimize_for_cpu_decode(model)
    assert any(isinstance(module, linear_class) for module in copy.modules())
    assert not any(isinstance(module, linear_class) for module in model.modules())
    tokens = random_ids(2, 12)
    assert error(copy(tokens), model(tokens)) < 1e-12
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.usefixtures("linear_class")
def test_the_copy_shares_all_weights() -> None:
    model = build(MODELS["multi-head"])
    copied, original = (dict(each.named_parameters()) for each in (optimize_for_cpu_decode(model), model))
    assert copied.keys() == original.keys() and all(copied[name] is original[name] for name in copied)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5,), (1, 1, 5), (4, 1, 5), (2, 3, 5), (70, 5)])
@pytest.mark.parametrize("compiling", [True, False])
def test_swapped_products_are_equal(
    shape: tuple[int, ...], bias: bool, compiling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear, x = nn.Linear(5, 7, bias).double(), torch.randn(shape, dtype=torch.float64)
    expected, products = linear(x), []

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        products.append(x.shape)
        return expected

    monkeypatch.setattr("torch.compiler.is_compiling", lambda: compiling)
    monkeypatch.setattr("torch.nn.functional.linear", product)
    found = SwappedLinear(linear)(x)
    assert error(found, expected) < 1e-12 and found.is_contiguous()
    assert bool(products) == (not compiling and shape in ((5,), (1, 1, 5), (70, 5)))  # too few rows, or too many


@pytest.mark.parametrize("outputs", [1, 2, 7, 12])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5,), (1, 5), (1, 1, 5), (2, 5)])
def test_two_streams_equal_one_product(
    shape: tuple[int, ...], bias: bool, outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear, x = nn.Linear(5, outputs, bias).double(), torch.randn(shape, dtype=torch.float64)
    expected, products = linear(x), []

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        products.append(x.shape)
        return expected

    monkeypatch.setattr("torch.compiler.is_compiling", lambda: True)  # the compiled path, run eagerly
    monkeypatch.setattr("torch.nn.functional.linear", product)
    assert error(TwoStreamLinear(linear)(x), expected) < 1e-12
    assert bool(products) == (shape == (2, 5))  # only several rows use the matrix product


@pytest.mark.slow
def test_compiled_equals_eager() -> None:
    """All of them in one graph: compiling takes the time. torch.compile must not see another architecture."""
    linears, x = [nn.Linear(64, 33, bias) for bias in (True, False)], torch.randn(1, 1, 64)
    optimized = [linear_class(linear) for linear_class in LINEAR_CLASSES.values() for linear in linears]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns on its first compile
        found = torch.compile(lambda x: [linear(x) for linear in optimized], fullgraph=True)(x)
    for output, linear in zip(found, linears * 2, strict=True):
        torch.testing.assert_close(output, linear(x))


def test_attention_maps_of_the_copy_are_equal(linear_class: type[nn.Module]) -> None:
    model = build(MODELS["grouped-query"])
    ids = random_ids(9)
    for found, expected in zip(
        attention_maps(optimize_for_cpu_decode(model), ids), attention_maps(model, ids), strict=True
    ):
        assert found is not None and expected is not None and error(found, expected) < 1e-12
