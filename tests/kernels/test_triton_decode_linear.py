"""The linear layer of a decode step equals its parts computed in float64, for one token and for several."""

import itertools

import pytest
import torch

from tests.kernels.linear_reference import EPS, compute, draw


@pytest.mark.parametrize("options", [(False,) * 3, (True, False, False), (False, True, True), (True,) * 3], ids=str)
@pytest.mark.parametrize("tokens, splits", [(1, 1), (3, 1), (17, 2), (32, 4)])
def test_norm_bias_and_residual(tokens: int, splits: int, options: tuple[bool, bool, bool]) -> None:
    from regard.kernels.triton_decode_linear import Tiles, launch

    x, weight, norm, bias, residual = draw(tokens, None, options, torch.float32)
    tiles = Tiles(2, 256, 4, programs=5) if tokens == 1 else Tiles(64, 32, 4, 2, splits)
    exact = compute(*(None if t is None else t.double() for t in (x, weight, norm, bias, residual)), None)
    for _ in range(2):  # the first launch resets its counters
        assert (launch(x, weight, norm, EPS, bias, residual, None, tiles) - exact).abs().max() <= 1e-5


@pytest.mark.parametrize("act", [None, "silu"])
@pytest.mark.parametrize("options", [(False, False, True), (True,) * 3, (True, True, False)], ids=str)
def test_many_tokens(options: tuple[bool, bool, bool], act: str | None) -> None:
    from regard.kernels.triton_decode_linear import MAX_TOKENS, launch

    x, weight, norm, bias, residual = draw(MAX_TOKENS + 1, act, options, torch.float32)
    exact = compute(*(None if t is None else t.double() for t in (x, weight, norm, bias, residual)), act)
    errors = (launch(x, weight, norm, EPS, bias, residual, act) - exact).abs() / exact.abs().clamp_min(1)
    assert errors.max() <= 1e-5


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("tokens, splits", [(1, 1), (5, 2)])
def test_gated_units(tokens: int, splits: int, act: str) -> None:
    from regard.kernels.triton_decode_linear import Tiles, launch

    x, weight, norm, bias, residual = draw(tokens, act, (True, True, True), torch.float32)
    tiles = Tiles(1, 256, 4, programs=5) if tokens == 1 else Tiles(64, 32, 4, 2, splits)
    exact = compute(*(t.double() for t in (x, weight, norm, bias, residual)), act)
    assert (launch(x, weight, norm, EPS, bias, residual, act, tiles) - exact).abs().max() <= 1e-5


@pytest.mark.parametrize("columns", [256, 1000, 4096, 14336, 28672])
def test_the_chosen_tiles_fit_and_occupy_the_device(columns: int) -> None:
    from regard.kernels.triton_decode_linear import choose_tiles

    one = choose_tiles(1, 4096, columns, False, 132)
    assert one.columns >= columns and one.columns & (one.columns - 1) == 0 and one.programs >= 132
    for tokens, outputs, gated in itertools.product((2, 16, 32), (1024, 3072, 6144, 14336, 128256), (False, True)):
        several = choose_tiles(tokens, outputs, columns, gated, 132)
        numbers = (several.outputs * (2 if gated else 1) + max(tokens, 16)) * several.columns * several.stages
        assert 2 * numbers <= 227 * 1024  # bytes of shared memory
        assert several.splits in (1, 2, 4)


@pytest.mark.gpu
@pytest.mark.parametrize("act", [None, "silu"])
@pytest.mark.parametrize("tokens", [1, 2, 16, 32])
@pytest.mark.parametrize("outputs, columns", [(1024, 1024), (1000, 1544), (4096, 14336)])
def test_bfloat16_on_a_gpu_is_as_exact_as_torch(outputs: int, columns: int, tokens: int, act: str | None) -> None:
    from regard.kernels.triton_decode_linear import launch

    arguments = draw(tokens, act, (True, False, True), torch.bfloat16, outputs, columns)
    exact = compute(*(None if t is None else t.double() for t in arguments), act)
    x, weight, norm, bias, residual = arguments
    kernel = launch(x, weight, norm, EPS, bias, residual, act)
    errors = [(y - exact).abs().max() for y in (kernel, compute(*arguments, act))]
    assert errors[0] <= 2 * errors[1] + torch.finfo(torch.bfloat16).eps
