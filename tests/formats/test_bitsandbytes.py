"""NF4 against bitsandbytes, whose authors defined it: codes, scales and dequantized weights, bit for bit."""

from typing import Any

import pytest
import torch
from torch import Tensor

from regard.formats.nf4 import NF4, SCALE_BLOCK, dynamic_levels

bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
F = bitsandbytes.functional
SHAPES = [(64, 64), (256, 512), (3, 1000, 64)]


def draw(shape: tuple[int, ...]) -> Tensor:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])) * 0.02
    weight.view(-1)[7] = 1.5
    weight.view(-1)[64:128] = 0
    return weight


def swap_halves(packed: Tensor) -> Tensor:
    """Of every byte: bitsandbytes stores the first of two codes in the upper bits."""
    return packed << 4 | packed >> 4


def their_tensors(codes: Tensor, state: Any, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """The tensors of bitsandbytes by our names."""
    stored = {"codes": swap_halves(codes).view(*shape[:-1], -1), "scale": state.absmax}
    if not state.nested:
        return stored
    return stored | {"scale_scale": state.state2.absmax, "scale_mean": state.offset.view(1)}


@pytest.mark.ledger("q.nf4")
@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_codes_scales_and_weights_are_equal(shape: tuple[int, ...], block: int) -> None:
    weight, format = draw(shape), NF4(block, double=False)
    codes, state = F.quantize_4bit(weight, blocksize=block, quant_type="nf4")
    theirs, ours = their_tensors(codes, state, shape), format.quantize(weight)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    # Not F.dequantize_4bit: with blocks of 128 its kernel for AVX512 has other scales.
    nibbles = torch.stack([codes.flatten() >> 4, codes.flatten() & 15], -1).flatten().long()
    expected = state.code[nibbles] * state.absmax.repeat_interleave(block)[: nibbles.numel()]
    assert torch.equal(format.dequantize(ours), expected[: weight.numel()].view(shape))


@pytest.mark.ledger("q.nf4")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_quantized_scales_are_equal(shape: tuple[int, ...]) -> None:
    weight, format = draw(shape), NF4()
    codes, state = F.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=True)
    theirs, ours = their_tensors(codes, state, shape), format.quantize(weight)
    for name in ("codes", "scale_scale", "scale_mean"):
        assert torch.equal(ours[name], theirs[name]), name
    assert torch.equal(state.state2.code, dynamic_levels())
    assert torch.equal(format.dequantize(theirs), F.dequantize_4bit(codes, state))
    # Its CPU kernel looks levels up in a table of 2¹⁶ entries, so close to the middle of two it may take the farther
    # one. Ours is the nearer one.
    other = ours["scale"] != theirs["scale"]
    assert other.sum() <= 1 + 0.005 * len(other)
    largest = ours["scale_scale"].repeat_interleave(SCALE_BLOCK)[: len(other)]
    scales = (weight.reshape(-1, 64).abs().amax(-1) - ours["scale_mean"]) / largest
    distances = [(scales - dynamic_levels()[stored["scale"].int()]).abs()[other] for stored in (ours, theirs)]
    assert (distances[0] <= distances[1]).all()
    assert (distances[1] - distances[0] <= 2.0**-14).all()
