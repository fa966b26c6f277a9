"""Mamba, Mamba-2 and their variants equal `transformers`' layers with the same weights: outputs and gradients."""

import pytest
import torch
from torch import Tensor

from regard.layout import TokenLayout
from tests.parts.ssm_foreign import PAIRS, WIDTH, build_pair, renamed

LENGTH = 11


@pytest.fixture
def all_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the modules of transformers from converting float64 inputs to float32."""
    to = torch.Tensor.to

    def never_narrower(tensor: Tensor, *wanted, **named) -> Tensor:
        return tensor.double() if wanted == (torch.float32,) else to(tensor, *wanted, **named)

    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(torch.Tensor, "to", never_narrower)


def tokens(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)


@pytest.mark.ledger("mamba.selective")
@pytest.mark.parametrize("name", PAIRS)
def test_outputs_and_gradients(name: str, all_in_float64: None) -> None:
    theirs, ours = build_pair(name, torch.float64)
    x = tokens().requires_grad_()
    expected, found = theirs(x), ours(x, TokenLayout.whole(2, LENGTH))
    assert (found - expected).abs().max() < 1e-12 * max(1, expected.abs().max())
    weights = dict(theirs.named_parameters())
    wanted = torch.autograd.grad(expected.sin().sum(), [x, *weights.values()])
    gradients = {"x": wanted[0]} | renamed(dict(zip(weights, wanted[1:], strict=True)), PAIRS[name].ours)
    mine = torch.autograd.grad(found.sin().sum(), [x, *ours.parameters()])
    for leaf, gradient in zip(["x", *dict(ours.named_parameters())], mine, strict=True):
        assert (gradient - gradients[leaf]).abs().max() < 1e-10 * max(1, gradients[leaf].abs().max()), leaf


@pytest.mark.parametrize(
    ("name", "side"),
    [(name, side) for name in PAIRS for side in ("left", "right") if side == "right" or not PAIRS[name].ours.bias],
)
def test_padding_changes_no_output(name: str, side: str, all_in_float64: None) -> None:
    """On the left only without a bias: theirs adds the bias to padding too, and their convolution reads it."""
    theirs, ours = build_pair(name, torch.float64)
    x, pads = tokens(), torch.tensor([4, 1])
    places = torch.arange(LENGTH)
    valid = places >= pads[:, None] if side == "left" else places < LENGTH - pads[:, None]
    positions = (places - pads[:, None]).clamp_min(0) if side == "left" else places.expand(2, LENGTH)
    with torch.no_grad():
        expected, found = theirs(x, attention_mask=valid), ours(x, TokenLayout(positions, valid=valid))
    assert (found - expected)[valid].abs().max() < 1e-12 * max(1, expected.abs().max())


@pytest.mark.parametrize("name", PAIRS)
def test_float32_error_is_at_most_that_of_transformers(name: str) -> None:
    _, exact = build_pair(name, torch.float64)
    theirs, ours = build_pair(name, torch.float32)
    layout = TokenLayout.whole(2, LENGTH)
    with torch.no_grad():
        truth = exact(tokens(), layout)
        error, allowed = ((y - truth).abs().max() for y in (ours(tokens().float(), layout), theirs(tokens().float())))
    assert error <= 2 * allowed + torch.finfo(torch.float32).eps * truth.abs().max()
