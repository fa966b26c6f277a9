"""Mamba, Mamba-2 and their variants equal `transformers`' layers with the same weights: outputs and gradients."""

import pytest
import torch
from torch import Tensor

from regard.layout import TokenLayout
from tests.parts.ssm_foreign import PAIRS, WIDTH, build_pair, to_our_names

LENGTH = 11


@pytest.fixture
def transformers_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the modules of transformers from converting float64 inputs to float32."""
    to = torch.Tensor.to

    def keep_float64(tensor: Tensor, *args, **kwargs) -> Tensor:
        return tensor.double() if args == (torch.float32,) else to(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(torch.Tensor, "to", keep_float64)


def random_inputs(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)


@pytest.mark.ledger("mamba.selective")
@pytest.mark.parametrize("name", PAIRS)
def test_outputs_and_gradients_equal_transformers(name: str, transformers_in_float64: None) -> None:
    theirs, ours = build_pair(name, torch.float64)
    x = random_inputs().requires_grad_()
    expected, found = theirs(x), ours(x, TokenLayout.whole(2, LENGTH))
    assert (found - expected).abs().max() < 1e-12 * max(1, expected.abs().max())
    weights = dict(theirs.named_parameters())
    their_gradients = torch.autograd.grad(expected.sin().sum(), [x, *weights.values()])
    expected_gradients = {"x": their_gradients[0]} | to_our_names(
        dict(zip(weights, their_gradients[1:], strict=True)), PAIRS[name].ours
    )
    found_gradients = torch.autograd.grad(found.sin().sum(), [x, *ours.parameters()])
    for leaf, gradient in zip(["x", *dict(ours.named_parameters())], found_gradients, strict=True):
        reference = expected_gradients[leaf]
        assert (gradient - reference).abs().max() < 1e-10 * max(1, reference.abs().max()), leaf


@pytest.mark.parametrize(
    ("name", "side"),
    [(name, side) for name in PAIRS for side in ("left", "right") if side == "right" or not PAIRS[name].ours.bias],
)
def test_padded_outputs_equal_transformers(name: str, side: str, transformers_in_float64: None) -> None:
    """Left padding is tested only without a bias: transformers adds the bias to padding, and convolves the result."""
    theirs, ours = build_pair(name, torch.float64)
    x, pads = random_inputs(), torch.tensor([4, 1])
    slots = torch.arange(LENGTH)
    valid = slots >= pads[:, None] if side == "left" else slots < LENGTH - pads[:, None]
    positions = (slots - pads[:, None]).clamp_min(0) if side == "left" else slots.expand(2, LENGTH)
    with torch.no_grad():
        expected, found = theirs(x, attention_mask=valid), ours(x, TokenLayout(positions, valid=valid))
    assert (found - expected)[valid].abs().max() < 1e-12 * max(1, expected.abs().max())


@pytest.mark.parametrize("name", PAIRS)
def test_float32_error_is_at_most_twice_that_of_transformers(name: str) -> None:
    _, exact = build_pair(name, torch.float64)
    theirs, ours = build_pair(name, torch.float32)
    x, layout = random_inputs(), TokenLayout.whole(2, LENGTH)
    with torch.no_grad():
        exact_output = exact(x, layout)
        our_error, their_error = ((y - exact_output).abs().max() for y in (ours(x.float(), layout), theirs(x.float())))
    assert our_error <= 2 * their_error + torch.finfo(torch.float32).eps * exact_output.abs().max()
