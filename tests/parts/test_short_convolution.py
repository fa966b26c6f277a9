"""The short convolution equals its sum in plain loops, one token and one tap at a time."""

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from regard.layout import TokenLayout
from regard.parts.short_convolution import ShortConvolution, ShortConvolutionModule

B, L, D = 2, 9, 3
DOCUMENTS = torch.tensor([[0] * 4 + [1] * 5, [2] * 2 + [3] * 1 + [4] * 6])
POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 0, 0, 1, 2, 3, 4, 5]])
TRUNCATED = POSITIONS + 7 * DOCUMENTS  # the first tokens of each document are absent


def mask_without(*padding: tuple[int, slice]) -> Tensor:
    mask = torch.ones(B, L, dtype=torch.bool)
    for row, span in padding:
        mask[row, span] = False
    return mask


def padded_left(*pads: int) -> TokenLayout:
    positions = torch.arange(L) - torch.tensor(pads).unsqueeze(-1)
    return TokenLayout(positions.clamp_min(0), valid=positions >= 0)


LAYOUTS = {
    "whole": TokenLayout.whole(B, L),
    "documents": TokenLayout(POSITIONS, DOCUMENTS),
    "truncated documents": TokenLayout(TRUNCATED, DOCUMENTS),
    "padded on the right": TokenLayout(POSITIONS, DOCUMENTS, mask_without((0, slice(6, None)), (1, slice(1, None)))),
    "padded on the left": padded_left(0, 5),
    "padded inside documents": TokenLayout(TRUNCATED, DOCUMENTS, mask_without((0, slice(2, 4)), (1, slice(2, 5)))),
}


def build(taps: int) -> tuple[ShortConvolutionModule, Tensor]:
    torch.manual_seed(taps)
    return ShortConvolution(taps).build(D).double(), torch.randn(B, L, D, dtype=torch.float64)


def plain_loop(x: Tensor, weight: Tensor, layout: TokenLayout) -> Tensor:
    out = torch.zeros_like(x)
    for b in range(B):
        tokens: dict[int, list[int]] = {}  # the valid tokens of each document so far
        for t in range(L):
            if layout.valid is None or layout.valid[b, t]:
                document = tokens.setdefault(0 if layout.segments is None else int(layout.segments[b, t]), [])
                document.append(t)
                for tap, index in zip(weight, reversed(document)):  # noqa: B905 (the shorter one limits the sum)
                    out[b, t] += tap * x[b, index]
    return out


@pytest.mark.parametrize("taps", [2, 4, L + 3])
@pytest.mark.parametrize("name", LAYOUTS)
def test_equals_the_sum_in_plain_loops(name: str, taps: int) -> None:
    (module, x), layout = build(taps), LAYOUTS[name]
    mask = torch.ones(B, L, dtype=torch.bool) if layout.valid is None else layout.valid
    found, expected = module(x, layout), plain_loop(x, module.weight, layout)
    assert (found - expected)[mask].abs().max() < 1e-12


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_equal_finite_differences(name: str) -> None:
    module, x = build(3)
    mask = torch.ones(B, L, 1) if LAYOUTS[name].valid is None else LAYOUTS[name].valid.unsqueeze(-1)

    def as_function(x: Tensor, weight: Tensor) -> Tensor:
        return torch.func.functional_call(module, {"weight": weight}, (x, LAYOUTS[name])) * mask

    assert gradcheck(as_function, (x.requires_grad_(), module.weight), fast_mode=True)
